"""docs/results.md and README's part: what stands in them is what the files say, and numbers of earlier code say so."""

import json

import pytest

from benchmarks import results_page, results_readme, results_tables
from benchmarks.common import RESULTS
from benchmarks.measured_code import digests
from tests.benchmarks.speed.test_whole import case

TABLES = results_tables.TABLES


def test_the_page_is_what_the_program_writes() -> None:
    assert results_page.PAGE.read_text() == results_page.page(), "python -m benchmarks.results_page"


def test_readmes_part_is_what_the_program_writes() -> None:
    text = results_readme.README.read_text()
    assert text == results_readme.in_readme(text, results_readme.readme_part()), "python -m benchmarks.results_page"


OTHER = dict.fromkeys(digests(), "other")
"""Of code that is not here."""
KERNELS = {"products": {"ms": 70.0, "count": 9.0, "top": {}}, "communication": {"ms": 30.0, "count": 9.0, "top": {}}}
STEP = {
    "settings": {"variant": "both"},
    "wall_ms": 140.0,
    "alone": {"forward": {"host_ms": 10.0, "done_ms": 30.0}},
    "kernels": KERNELS,
    "gpu": {"steps": 2, "span_ms": 280.0, "busy_ms": 260.0, "communication_alone_ms": 12.0},
}
"""Made up."""


def put(folder, name, content, code=None) -> None:
    """A result."""
    environment = {"code": code or digests(), "commit": "0123456789", "gpus": ["NVIDIA H200"] * 2}
    content = content | {"environment": content.get("environment", {}) | environment}
    (folder / "speed" / f"{name}.json").write_text(json.dumps(content))


@pytest.fixture
def results(tmp_path):
    """What the tables are made of, as if of the code that is here: a copy, and what is not there yet made up."""
    (tmp_path / "speed").mkdir()
    for table in TABLES.values():
        for name in table.results:
            if (have := results_tables.read(name)) is not None:
                put(tmp_path, name, have)
    for room, name in (("convergence", "branches"), ("accuracy", "trajectories")):
        (tmp_path / room).mkdir()
        (tmp_path / room / f"{name}.json").write_text((RESULTS / room / f"{name}.json").read_text())
    put(tmp_path, "step", STEP)
    other = STEP | {"settings": {"variant": "TE fp8 delayed"}, "kernels": {"other": KERNELS["products"]}}
    put(tmp_path, "step-te-fp8", other)
    put(tmp_path, "whole", {"cases": [case("BF16", {1: 1000.0}, 2), case("both", {1: 1200.0, 2: 2000.0}, 3)]})
    return tmp_path


def test_tables_of_earlier_code_say_so(results) -> None:
    table = TABLES["layers"]
    assert "earlier code" not in "\n".join(results_tables.lines_of(table, results))
    put(results, "experts", results_tables.read("experts", results), "other")
    assert results_tables.lines_of(table, results)[-1] == "Of earlier code: `experts.json`, commit 0123456."
    (results / "speed/experts.json").unlink()
    assert results_tables.lines_of(table, results) == ["Not measured yet: `experts.json`."]


def test_every_table_has_numbers(results) -> None:
    for name, table in TABLES.items():
        lines = results_tables.lines_of(table, results)
        assert lines[0].startswith(("Not measured yet", "###")) or (len(lines) > 2 and lines[1].startswith("|---")), (
            name
        )
        assert not any("{{" in line for line in lines)
    text = results_page.page(results)
    assert "{{" not in text and "earlier code: `" not in text


def test_where_a_steps_time_goes(results) -> None:
    lines = results_tables.lines_of(TABLES["step"], results)
    assert lines[0] == "|  | Transformer Engine, FP8 | coat |"
    assert "| GPU: products |  | 70.0 ms |" in lines and "| GPU: other | 70.0 ms |  |" in lines
    assert "| GPU: communication and nothing else | 6.0 ms | 6.0 ms |" in lines
    assert "| GPU: nothing | 10.0 ms | 10.0 ms |" in lines
    assert lines[-1] == "| forward alone: host, done | 10.0 ms, 30.0 ms | 10.0 ms, 30.0 ms |"


def training(first_loss):
    """Made up."""
    memory = {"optimizer moments": {"bytes": 8, "elements": 1}, "activations": {"bytes": 2**30, "elements": 1}}
    return {
        "settings": {"ranks": 2, "layers": 8, "micro_batch": [2], "steps": 50, "vocabulary": 32000},
        "runs": [
            {
                **{"config": name, "step_ms": ms, "tokens_per_second_per_gpu": 1e6 / ms, "memory": memory},
                **{"peak_memory_gib": 20.0, "losses": [loss, 1.0], "largest_loss_gap": 0.01, "last_ten_loss_gap": 0.02},
            }
            for name, ms, loss in [
                ("TE bf16", 200.0, first_loss),
                ("TE fp8 delayed", 160.0, 11.2),
                ("zero2-bf16", 250.0, 11.0),
                ("zero2", 100.0, 11.1),
            ]
        ],
    }


@pytest.mark.parametrize("first_loss, gaps", [(11.001, "1.00 % | 2.00 %"), (11.05, " | ")])
def test_losses_of_a_peer_are_compared_where_it_began_with_the_same_weights(results, first_loss, gaps) -> None:
    put(results, "train-2-ranks", training(first_loss))
    lines = results_tables.lines_of(TABLES["train"], results)
    assert "| to Transformer Engine BF16 | to BF16 | moments" in lines[0]
    assert [line.split(" | ")[3:5] for line in lines[2:]] == [
        ["1.00", "1.25"], ["1.25", "1.56"], ["0.80", "1.00"], ["2.00", "2.50"],
    ]  # fmt: skip
    assert [line.removesuffix(" |").endswith(f"20.0 GiB | {gaps}") for line in lines[2:4]] == [True, True]
    assert lines[4].endswith("20.0 GiB |  |  |") and lines[5].endswith("1.00 % | 2.00 % |")


SPEED = {"train": "**Training", "whole": "**A whole", "layer": "**One layer", "optimizer": "**The optimizer"}


def test_readme_has_the_first_three_tables_of_the_present_code(results, tmp_path) -> None:
    put(results, "train-2-ranks", training(11.0))
    text = results_readme.readme_part(results, tmp_path)
    shown = [name for name, start in SPEED.items() if start in text]
    assert shown == ["train", "whole", "layer"] and "Also measured with the present code: the optimizer's step." in text
    flat = text.replace("\n", " ")
    assert "Here are some, all of the present code." in flat and max(map(len, text.split("\n"))) < 300
    assert "two H200s" in flat and "with the layers of Transformer Engine" in flat and "one H200" in flat


def test_readme_has_training_on_one_gpu_where_two_were_not_measured_with_this_code(results, tmp_path) -> None:
    one = training(11.0)
    one["settings"]["ranks"] = 1
    for name, code in (("train-2-ranks", OTHER), ("train-1-rank", digests())):
        put(results, name, training(11.0) if name == "train-2-ranks" else one, code)
    assert "ZeRO-2, one H200, 50 steps" in results_readme.readme_part(results, tmp_path).replace("\n", " ")
    put(results, "train-1-rank", one | {"notes": ["One of them on another day."]})
    assert results_tables.lines_of(TABLES["train_one"], results)[-2:] == ["", "One of them on another day."]
    put(results, "train-2-ranks", training(11.0))
    assert "ZeRO-2, two H200s, 50 steps" in results_readme.readme_part(results, tmp_path).replace("\n", " ")


def test_layers_of_several_shapes(results) -> None:
    runs = {
        "bf16": {"ms": 40.0, "saved_bytes_per_token": 173960.0},
        "coat": {"ms": 24.0, "saved_bytes_per_token": 64056.0, "ratio_to_bf16": 0.6},
    }
    put(results, "layer", {"results": [{"preset": "llama2-7b", "tokens": 16384, "runs": runs}]})
    lines = results_tables.lines_of(TABLES["layer_presets"], results)
    assert lines[2:] == ["| llama2-7b, 16 384 | 40.00 ms | 24.00 ms | 0.600 | 173 960 | 64 056 |"]
    runs = runs | {"coat cuda graphs": {"ms": 20.0, "ratio_to_bf16": 0.5}}
    put(results, "layer-4096", {"results": [{"preset": "olmo-1b", "tokens": 4096, "runs": runs}]})
    lines = results_tables.lines_of(TABLES["layer_graphs"], results)
    assert lines[2:] == ["| olmo-1b, 4 096 | 40.00 ms | 24.00 ms | 0.600 | 20.00 ms | 0.500 |"]


def test_small_models_by_micro_batch(results) -> None:
    cases = [case(name, steps) for name, steps in (("BF16", {1: 1000.0}), ("both", {1: 1500.0, 2: 3000.0}))]
    for step in (step for one in cases for step in one["steps"]):
        step["peak_bytes"] = 2**31
    put(results, "whole-small", {"cases": cases})
    lines = results_tables.lines_of(TABLES["small_whole"], results)
    assert lines[2:] == [
        "| 1 | 1 000 (1.00), 2.0 GiB | 1 500 (1.50), 2.0 GiB |",
        "| 2 |  | 3 000, 2.0 GiB |",
    ]
    cases[1]["measured"]["code"] = OTHER
    put(results, "whole-small", {"cases": [*cases, case("both, CUDA graphs", {}) | {"cut": "without a step"}]})
    lines = results_tables.lines_of(TABLES["small_whole"], results)
    assert lines[2] == "| 1 | 1 000 (1.00), 2.0 GiB | 1 500, 2.0 GiB |  |", "a ratio is of one code"
    assert lines[-3].startswith("\u2020 ") and lines[-1].startswith("Not finished: both, CUDA graphs")


def test_micro_batches_say_how_often_the_allocator_began_anew(results) -> None:
    one = case("both", {8: 1000.0, 10: 900.0})
    for step, retries in zip(one["steps"], (0, 3), strict=True):
        step |= {"allocator_retries": retries, "peak_bytes": 2**30}
    put(results, "micro-batches", {"cases": [one]})
    lines = results_tables.lines_of(TABLES["micro_batches"], results)
    assert lines[0].startswith("| micro-batch | ") and lines[2:] == [
        "| 8 | 1 000 | 1.0 GiB | 0 |",
        "| 10 | 900 | 1.0 GiB | 3 |",
    ]
    put(results, "micro-batches", {"cases": [one | {"measured": one["measured"] | {"code": OTHER}}]})
    assert "\u2020" in results_tables.lines_of(TABLES["micro_batches"], results)[0]


def test_what_readme_says_of_losses_and_moments_is_of_the_present_code(results, tmp_path) -> None:
    for room, name, words in (
        ("convergence", "branches", "ended **+0.12 % ± "),
        ("accuracy", "trajectories", "an error of 0.12 % where gradients are random, "),
    ):
        file = results / f"{room}/{name}.json"
        found = json.loads(file.read_text())
        for rows in (found.get("gaps", []), found.get("rows", [])):
            for row in rows[:1]:
                row |= {"held_out_loss_gap": 0.00123, "random 2000 error": 0.00123}
        for code, shown in ((None, False), (OTHER, False), (digests(), True)):
            file.write_text(json.dumps(found | {"environment": {"code": code, "commit": "0123456789"}}))
            assert (words in results_readme.readme_part(results, tmp_path).replace("\n", " ")) == shown
        file.unlink()
        assert words not in results_readme.readme_part(results, tmp_path)


@pytest.mark.parametrize(
    "commit, code, difference, shown",
    [
        ("0123456", digests(), None, True),
        ("0123456", digests(), 7, False),
        ("0123456", OTHER, None, False),
        ("89abcde", digests(), None, False),
    ],
)
def test_losses_hold_as_long_as_the_code_trains_to_the_same_bits(
    results, tmp_path, commit, code, difference, shown
) -> None:
    file = results / "convergence/branches.json"
    found = json.loads(file.read_text())
    file.write_text(json.dumps(found | {"environment": {"code": None, "commit": "0123456789"}}))
    same = {"environment": {"code": code, "gpus": []}, "settings": {"commit": commit}, "now": [{}] * 50}
    (results / "convergence/same-bits.json").write_text(json.dumps(same | {"first_difference": difference}))
    text = results_readme.readme_part(results, tmp_path).replace("\n", " ")
    words = "measured at commit 0123456, and on a CPU the present code takes 50 steps with the same losses"
    assert (words in text) == shown == ("**Losses.**" in text)


def test_a_change_outdates_the_tables_it_is_about(results) -> None:
    """Layers are measured again for a change of the flow, and the optimizer's step is not."""
    for name in ("optimizer", "layer-peers-7b", "train-2-ranks"):
        put(results, name, results_tables.read(name, results), digests() | {"flow": "other"})
    old = {name: results_tables.lines_of(TABLES[name], results)[-1] for name in ("optimizer", "layer", "train")}
    assert [name for name, line in old.items() if line.startswith("Of earlier code: ")] == ["layer", "train"]


def test_a_table_of_other_code_is_not_in_readme(results, tmp_path) -> None:
    for name in ("train-2-ranks", "train-1-rank", "layer-peers-7b", "optimizer"):
        put(results, name, results_tables.read(name, results), OTHER)
    text = results_readme.readme_part(results, tmp_path)
    assert [name for name, start in SPEED.items() if start in text] == ["whole"]
    ms = results_tables.read("layer-peers-7b", results)["results"][0]["runs"]["coat"]["ms"]
    assert f"{ms:.2f} ms" in results_page.page(results) and f"{ms:.2f} ms" not in text
    words = "training end to end, one layer and the optimizer's step have not been measured with it yet"
    assert words in text.replace("\n", " ")
    for cases in (
        [case("BF16", {1: 1000.0}, 2), case("both", {1: 1200.0}, 2, code=OTHER)],
        [case("BF16", {1: 1000.0}, 2), case("both", {1: 1200.0}, cut=True)],
        [case("BF16", {1: 1000.0}, 2, gpu_memory=80.0), case("both", {1: 1200.0}, 2, gpu_memory=80.0)],
    ):
        put(results, "whole", {"cases": cases})
        text = results_readme.readme_part(results, tmp_path)
        assert "|---" not in text and "at the moment there are none" in text.replace("\n", " ")
    for ranks in ("2-ranks", "1-rank"):
        (results / f"speed/train-{ranks}.json").unlink()
    assert "|---" not in results_readme.readme_part(results, tmp_path)


def test_cases_of_other_code_are_left_out_of_readmes_table(results, tmp_path) -> None:
    cases = [
        case("BF16", {1: 1000.0}, 2), case("both", {1: 1200.0}), case("flow only", {1: 1111.0}, 2, code=OTHER),
        case("BF16", {1: 600.0}, 2, ranks=1), case("both", {1: 700.0}, 2, ranks=1),
    ]  # fmt: skip
    put(results, "whole", {"cases": cases})
    text = results_readme.readme_part(results, tmp_path)
    assert "| both | 1+ |" in text and "1 111" not in text and "| 700 |" not in text
    assert "1 111" in results_page.page(results)


def test_the_figure_of_whole_models(results, tmp_path) -> None:
    """It is drawn where there are cases, both pages show it then, README where all of it is of the present code."""
    figure, link = tmp_path / results_page.FIGURE, f"figures/{results_page.FIGURE})"
    assert link not in results_page.page(results, tmp_path) and link not in results_readme.readme_part(
        results, tmp_path
    )
    assert results_page.draw(results, tmp_path) == figure and figure.stat().st_size > 10_000
    assert link in results_page.page(results, tmp_path) and link in results_readme.readme_part(results, tmp_path)
    cases = results_tables.read("whole", results)["cases"]
    put(results, "whole", {"cases": [*cases, case("flow only", {1: 1111.0}, code=OTHER)]})
    assert link in results_page.page(results, tmp_path) and link not in results_readme.readme_part(results, tmp_path)
    put(results, "whole", {"cases": [case("BF16", {}, error="so it went")]})
    assert results_page.draw(results, tmp_path) is None and not figure.exists()


def test_readmes_marks() -> None:
    begin, end = results_readme.BEGIN, results_readme.END
    assert results_readme.in_readme(f"a\n{begin}\nb\n{end}\nc", r"\1") == f"a\n{begin}\n\\1\n{end}\nc"
    for text in ("", begin, f"{begin}{end}{end}"):
        with pytest.raises(ValueError, match="README.md: accepted: one"):
            results_readme.in_readme(text, "")

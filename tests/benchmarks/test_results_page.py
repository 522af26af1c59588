"""docs/results.md: what stands in it is what the files say, and numbers of earlier code say so."""

import errno
import json
from pathlib import Path

import pytest

from benchmarks import results_page, results_readme, results_tables
from benchmarks.measured_code import digests
from tests.benchmarks.made_up import OTHER, put, training
from tests.benchmarks.speed.test_whole import case

TABLES = results_tables.TABLES


def test_the_page_is_what_the_program_writes() -> None:
    assert results_page.PAGE.read_text() == results_page.page(), "python -m benchmarks.results_page"


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
    assert lines[2] == "| 1 | 1 000 (1.00), 2.0 GiB | 1 500, 2.0 GiB |", "a ratio is of one code"
    assert lines[-3].startswith("\u2020 ") and lines[-1].startswith("Not finished: both, CUDA graphs")
    smaller = [case(name, {1: 900.0}, gpu_memory=80.0) for name in ("both", "BF16")]
    del smaller[0]["steps"][0]["peak_bytes"]  # as without a GPU
    put(results, "whole-small", {"cases": [*cases, *smaller]})
    lines = results_tables.lines_of(TABLES["small_whole"], results)
    assert [line for line in lines if line.startswith("### ")] == [
        "### llama2-7b, 2 x H200, ZeRO-2", "### llama2-7b, 2 x H200, 80 GiB of it, ZeRO-2",
    ]  # fmt: skip
    assert "| 1 | 900 (1.00) | 900 (1.00), 1.0 GiB |" in lines


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
    put(results, "micro-batches", {"cases": [one, case("BF16", {8: 500.0}), case("flow only", {1: 1.0}, cut=True)]})
    lines = results_tables.lines_of(TABLES["micro_batches"], results)
    assert lines[0] == "### llama2-7b, 2 x H200, ZeRO-2, both" and "| 8 | 500 | 8.0 GiB | 7 |" in lines
    assert lines[-1].startswith("Not finished: flow only")
    put(results, "micro-batches", {"cases": [one | {"measured": one["measured"] | {"code": OTHER}}]})
    assert "\u2020" in results_tables.lines_of(TABLES["micro_batches"], results)[0]


def test_a_change_outdates_the_tables_it_is_about(results) -> None:
    """Layers are measured again for a change of the flow, and the optimizer's step is not."""
    for name in ("optimizer", "layer-peers-7b", "train-2-ranks"):
        put(results, name, results_tables.read(name, results), digests() | {"flow": "other"})
    old = {name: results_tables.lines_of(TABLES[name], results)[-1] for name in ("optimizer", "layer", "train")}
    assert [name for name, line in old.items() if line.startswith("Of earlier code: ")] == ["layer", "train"]


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


def test_half_of_a_result_is_named(results) -> None:
    file = results / "speed/optimizer.json"
    file.write_text(file.read_text()[:100])
    with pytest.raises(ValueError, match=r"speed/optimizer.json: got .*, accepted: JSON; remove it"):
        results_tables.lines_of(TABLES["optimizer"], results)
    file.write_text('{"environment": {"commit": "abc"}}')
    with pytest.raises(ValueError, match=r"^optimizer.json in .*: KeyError: .*; accepted: results as their commands"):
        results_tables.lines_of(TABLES["optimizer"], results)


@pytest.mark.parametrize(
    ("content", "lacks"),
    [
        ("null", "`environment` with `commit`"),
        ("{}", "`environment` with `commit`"),
        ("[]", "`environment` with `commit`"),
        ('{"environment": {}}', "`environment` with `commit`"),
        ('{"environment": {"commit": "abc"}, "cases": null}', "records in `cases`"),
        ('{"environment": {"commit": "abc"}, "runs": []}', "records in `runs`"),
        ('{"environment": {"commit": "abc"}}', "`cases`"),
        ('{"environment": {"commit": "abc"}, "cases": [{}]}', "`model` in one of its cases"),
    ],
)
def test_damaged_results_are_named(results, content, lacks) -> None:
    (results / "speed/whole.json").write_text(content)
    with pytest.raises(ValueError, match=rf"speed/whole.json: lacks {lacks}, accepted: what its command writes"):
        results_page.page(results)


@pytest.mark.parametrize("where", ["measure", "page", "readme"])
@pytest.mark.parametrize("problem", [ValueError("of a file"), KeyError("cases"), TypeError("no list")])
def test_damaged_results_are_one_error(monkeypatch, capsys, where, problem) -> None:
    """Also found before measuring, and nothing is written."""

    def fail(*_):
        raise problem

    monkeypatch.setattr(results_page, where, fail)
    monkeypatch.setattr(results_page, "draw", lambda: pytest.fail("the figure was drawn"))
    with pytest.raises(SystemExit, match="2"):
        results_page.main(["--measure"] if where == "measure" else [])
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and str(problem) in said


@pytest.fixture
def pages(monkeypatch, tmp_path, results):
    """The three files that are written, elsewhere, and what they are before."""
    texts = {tmp_path / name: f"old {name}" for name in ("results.md", "README.md", results_page.FIGURE)}
    for path, text in texts.items():
        path.write_text(text)
    page, readme, _ = texts
    monkeypatch.setattr(results_page, "ROOT", tmp_path)
    monkeypatch.setattr(results_page, "PAGE", page)
    monkeypatch.setattr(results_page, "README", readme)
    monkeypatch.setattr(results_page, "page", lambda: "new page")
    monkeypatch.setattr(results_page, "readme", lambda text: f"{text}, new")
    draw = results_page.draw
    monkeypatch.setattr(results_page, "draw", lambda: draw(results, tmp_path))
    return texts


def test_pages_are_written(pages, capsys) -> None:
    results_page.main([])
    page, readme, figure = pages
    assert page.read_text() == "new page" and readme.read_text() == "old README.md, new"
    assert figure.read_bytes().startswith(b"\x89PNG") and capsys.readouterr().out.count("wrote ") == 3


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_full_disk_cuts_no_page(pages, monkeypatch, refused, which) -> None:
    full, real = [*pages][which], Path.write_bytes

    def write_bytes(path, content):
        if full.name not in path.name:
            return real(path, content)
        real(path, content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    with refused(f"error: {full}: No space left on device"):
        results_page.main([])
    assert full.read_text() == pages[full] and not list(full.parent.glob(".*"))


def test_losses_on_the_page_are_those_of_the_branches(results) -> None:
    branches = results_tables.read("convergence/branches", results)
    (gap,) = (one for one in branches["gaps"] if one["variant"] == "row scales")
    gap["held_out_loss_gap"], gap["trunks"] = 0.0123, ["one", "two", "three"]
    (results / "convergence/branches.json").write_text(json.dumps(branches))
    assert "**+1.23 % ± " in results_page.page(results) and "BF16 layers (3 seeds)" in results_page.page(results)
    (results / "convergence/branches.json").unlink()
    assert "above that of BF16: not measured yet." in results_page.page(results)

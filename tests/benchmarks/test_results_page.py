"""docs/results.md and README's part: what stands in them is what the files say, and numbers of earlier code say so."""

import json
import time

import pytest

from benchmarks import results_measure, results_page, results_readme, results_tables
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
    for name in ("train-2-ranks", "layer-peers-7b", "optimizer"):
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
    (results / "speed/train-2-ranks.json").unlink()
    assert "|---" not in results_readme.readme_part(results, tmp_path)


def test_cases_of_other_code_are_left_out_of_readmes_table(results, tmp_path) -> None:
    cases = [
        case("BF16", {1: 1000.0}, 2), case("both", {1: 1200.0}), case("flow only", {1: 1111.0}, 2, code=OTHER),
        case("BF16", {1: 600.0}, 2, ranks=1), case("both", {1: 700.0}, 2, ranks=1),
    ]  # fmt: skip
    put(results, "whole", {"cases": cases})
    text = results_readme.readme_part(results, tmp_path)
    assert "| both | 1+ |" in text and "1,111" not in text and "| 700 |" not in text
    assert "1,111" in results_page.page(results)


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


@pytest.fixture
def started(monkeypatch):
    """Commands are not started but collected, on two H200s; an optimizer fails."""
    found = []

    def start(words, seconds):
        found.append(words)
        return int("optimizer" in str(words))

    monkeypatch.setattr(results_measure, "start", start)
    monkeypatch.setattr(results_measure, "gpus", lambda: ["NVIDIA H200"] * 2)
    return found


@pytest.fixture
def peers(tmp_path):
    (tmp_path / "transformer_engine").mkdir()
    return str(tmp_path)


def known(monkeypatch, *missing):
    """All results are there and of this code, but those that are ``missing``."""
    found = {name: {"environment": {"code": digests()}} for table in TABLES.values() for name in table.results}
    found["train-2-ranks"]["runs"] = [{"config": "TE bf16"}]
    for name in ("whole", "whole-4", "whole-h100"):
        found[name]["cases"] = []
    for name in missing:
        del found[name]
    monkeypatch.setattr(results_measure, "read", found.get)
    return found


def modules(started) -> list[str]:
    return [next(word for word in words if word.startswith("benchmarks.")).rpartition(".")[2] for words in started]


def test_what_is_measured(monkeypatch, capsys, started, peers) -> None:
    """What is missing, outdated or can go on, in the tables' order, with the peers' folder; failures have names."""
    known(monkeypatch, "experts")["optimizer"]["environment"]["code"] = OTHER
    found = list(dict.fromkeys(name for name, _ in results_measure.to_measure([*TABLES])))
    assert found == ["experts", "optimizer", "whole", "whole-4", "whole-h100"]
    results_measure.measure(results_page.parse(["--measure", "--peers", peers]))
    assert modules(started) == ["experts", "optimizer", *["whole"] * 4]
    assert started[-1][-4:-1] == ["--peers", peers, "--seconds"]
    out = capsys.readouterr().out
    assert "optimizer: ended with 1" in out and "left out, is about H100, not NVIDIA H200: whole-h100" in out
    assert "left out, needs 4 GPUs, 2 here: whole-4" in out


def test_results_have_their_place(capsys) -> None:
    """An option that programs have and that would do nothing here is not taken."""
    with pytest.raises(SystemExit):
        results_page.parse(["--measure", "--output", "elsewhere"])
    assert "--output" in capsys.readouterr().err


def test_a_program_that_has_nothing_left_is_not_started(monkeypatch) -> None:
    from benchmarks.speed import whole

    command = TABLES["whole"].results["whole"][2]
    arguments = whole.parse([*results_measure.words_of(command, "x")[2:]])
    done = [one | {"steps": [], "out_of_memory_at": 1} for one in whole.cases_of(arguments)]
    done = [one | {"measured": {"code": digests()}} for one in done]
    known(monkeypatch)["whole"]["cases"] = done
    left = [("whole", one) for one in TABLES["whole"].results["whole"] if one != command]
    assert arguments.ranks == 1 and results_measure.to_measure(["whole"]) == left
    done[0]["measured"]["code"] = OTHER
    assert len(results_measure.to_measure(["whole"])) == 4


def test_what_is_not_measured_here(monkeypatch, capsys, started, peers) -> None:
    known(monkeypatch, "optimizer", "layer-peers-7b", "train-2-ranks")
    results_measure.measure(results_page.parse(["--measure", "--only", "whole", "layer"]))
    results_measure.measure(results_page.parse(["--measure", "--seconds", "1", "--only", "optimizer"]))
    out = capsys.readouterr().out
    assert not started and "left out, needs --peers: whole" in out
    assert "not started, 1 of 1 seconds are left: optimizer" in out
    results_measure.measure(results_page.parse(["--measure", "--only", "train"]))
    results_measure.measure(results_page.parse(["--measure", "--only", "train", "--peers", peers]))
    assert [words[2:] for words in started] == [["--ranks", "2"], ["--ranks", "2", "--peers", peers]]
    known(monkeypatch)["train-2-ranks"]["runs"] = [{"config": "zero2"}]
    measured = [results_measure.to_measure(["train"], peers=with_peers) for with_peers in (False, True)]
    assert [len(found) for found in measured] == [0, 1], "what was measured without peers, where there are some"
    started.clear()
    monkeypatch.setattr(results_measure, "gpus", lambda: ["NVIDIA H100"])
    known(monkeypatch, *(name for table in TABLES.values() for name in table.results))
    results_measure.measure(results_page.parse(["--measure", "--peers", peers]))
    assert len(started) == 4, "what the page says of an H100, and nothing that it says of an H200"
    assert all("h100" in " ".join(words) for words in started)
    assert "left out, needs 2 GPUs, 1 here: train-2-ranks" in capsys.readouterr().out


def test_a_command_that_would_not_be_through_is_left_for_the_next_call(monkeypatch, capsys, started, peers) -> None:
    """The first one is started anyway: with more time than a call has nothing would ever be measured."""
    known(monkeypatch, "train-2-ranks", "train-tp-2", "optimizer")
    results_measure.measure(
        results_page.parse(
            ["--measure", "--seconds", "150", "--peers", peers, "--only", "train", "train_tp", "optimizer"]
        )
    )
    assert modules(started) == ["train", "optimizer"]
    assert "not started, 150 of 150 seconds are left: train-tp-2" in capsys.readouterr().out


def test_an_archive_of_the_peer_is_unpacked_once(monkeypatch, started, tmp_path) -> None:
    import tarfile

    with tarfile.open(tmp_path / "transformer_engine.tar.gz", "w:gz") as archive:
        archive.add(RESULTS.parent / "__init__.py", "transformer_engine/__init__.py")
    known(monkeypatch, "layer-peers-7b", "tp-layer")
    options = ["--measure", "--peers", str(tmp_path), "--only", "layer", "layers"]
    results_measure.measure(results_page.parse(options))
    folders = {words[words.index("--peers") + 1] for words in started}
    assert len(started) == 2 and len(folders) == 1 and str(tmp_path) not in folders


def test_nothing_of_a_command_that_is_cut_is_left_behind(tmp_path) -> None:
    """Its ranks, which it cannot end itself when it is killed, and one that it leaves behind when it ends."""
    rank = f"import pathlib, time; time.sleep(6); pathlib.Path({str(tmp_path / 'alive')!r}).touch()"
    program = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {rank!r}])"
    assert results_measure.start(["-c", f"{program}; time.sleep(60)"], 2) == "time was over"
    assert results_measure.start(["-c", program], 30) == 0
    assert results_measure.start(["-c", "import sys; sys.exit(3)"], 30) == 3
    time.sleep(6)
    assert not (tmp_path / "alive").exists()


def test_commands_are_understood() -> None:
    """Those of the tables write the files that they are for."""
    import importlib
    import shlex

    for table in TABLES.values():
        for name, command in ((name, one) for name, commands in table.results.items() for one in commands):
            words = shlex.split(command.replace("PEERS?", "--peers x").replace("PEERS", "--peers x"))
            at = words.index("-m", 2) if "-m" in words[2:] else 0
            parsed = importlib.import_module(words[at + 1]).parse(words[at + 2 :])
            stem = words[at + 1].rpartition(".")[2].replace("_", "-")
            given = getattr(parsed, "name", None) or stem
            name = name.rpartition("/")[2]
            assert name == given or name.startswith(f"{given}-"), command

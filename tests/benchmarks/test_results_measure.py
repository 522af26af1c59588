"""``results_page --measure``: what is measured, in which order, and what is left for the next call."""

import signal

import pytest

from benchmarks import results_measure, results_page
from benchmarks.common import RESULTS
from benchmarks.measured_code import digests
from tests.benchmarks.made_up import put
from tests.benchmarks.test_results_page import OTHER, TABLES


@pytest.fixture
def started(monkeypatch):
    """Commands are not started but collected, on two H200s; an optimizer fails."""
    found = []

    def start(words, seconds, stopped):
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
    for name in ("train-2-ranks", "train-1-rank"):
        found[name]["runs"] = [{"config": "TE bf16"}]
    for name in ("whole", "whole-4", "whole-h100", "whole-small", "micro-batches"):
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
    assert found == ["experts", "optimizer", "whole", "micro-batches", "whole-small", "whole-4", "whole-h100"]
    results_measure.measure(results_page.parse(["--measure", "--peers", peers]))
    assert modules(started) == ["experts", "optimizer", *["whole"] * 6]
    assert started[-3][-4:-1] == ["--peers", peers, "--seconds"]
    out = capsys.readouterr().out
    assert "optimizer: ended with 1" in out and "left out, is about H100, not NVIDIA H200: whole-h100" in out
    assert "left out, needs 4 GPUs, 2 here: whole-4" in out


def test_again_is_told_to_a_program_that_goes_on(monkeypatch, started) -> None:
    """It would find everything in its result, and measure nothing."""
    known(monkeypatch)
    results_measure.measure(results_page.parse(["--measure", "--only", "small_whole", "layer_graphs", "--again"]))
    assert modules(started) == ["whole", "layer"] and ["--again" in words for words in started] == [True, False]


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


def test_cases_that_a_table_lacks_are_named_in_the_page(results) -> None:
    left = results_measure.cases_left(TABLES["small_whole"], results)
    assert left == []
    cases = results_measure.read("whole-small", results)["cases"]
    put(results, "whole-small", {"cases": [one for one in cases if one["variant"] == "BF16"]})
    (line,) = results_measure.cases_left(TABLES["small_whole"], results)
    assert line == "Not measured yet, of olmo-1b on 1 x H200, ZeRO-2: both; both, CUDA graphs."
    assert f"\n\n{line}\n\n" in results_page.page(results)
    (results / "speed/whole-small.json").unlink()
    assert (
        results_measure.cases_left(TABLES["small_whole"], results) == results_measure.cases_left(TABLES["layer"]) == []
    )


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


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--seconds", "60"], "--seconds: got it without --measure"),
        (["--seconds", "540"], "--seconds: got it without --measure"),
        (["--peers", "x"], "--peers: got it without --measure"),
        (["--measure", "--seconds", "-1"], "--seconds: got -1, accepted: a number > 0"),
        (["--measure", "--seconds", "nan"], "--seconds: got nan, accepted: a number > 0"),
    ],
)
def test_options_that_would_do_nothing_are_refused(given, told, capsys) -> None:
    with pytest.raises(SystemExit):
        results_page.parse(given)
    assert told in capsys.readouterr().err


def test_an_archive_of_the_peer_is_unpacked_once(monkeypatch, started, tmp_path) -> None:
    import tarfile

    with tarfile.open(tmp_path / "transformer_engine.tar.gz", "w:gz") as archive:
        archive.add(RESULTS.parent / "__init__.py", "transformer_engine/__init__.py")
    known(monkeypatch, "layer-peers-7b", "tp-layer")
    options = ["--measure", "--peers", str(tmp_path), "--only", "layer", "layers"]
    results_measure.measure(results_page.parse(options))
    folders = {words[words.index("--peers") + 1] for words in started}
    assert len(started) == 2 and len(folders) == 1 and str(tmp_path) not in folders


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_what_runs_and_starts_nothing_more(monkeypatch, capsys, started, sign) -> None:
    known(monkeypatch, "optimizer", "tp-layer")

    def start(words, seconds, stopped):
        started.append(words)
        assert not stopped()
        signal.raise_signal(sign)
        assert stopped()
        return "time was over"

    monkeypatch.setattr(results_measure, "start", start)
    before = signal.getsignal(sign)
    with pytest.raises(SystemExit) as ending:
        results_measure.measure(results_page.parse(["--measure", "--only", "optimizer", "layers"]))
    assert ending.value.code == 128 + sign and len(started) == 1 and signal.getsignal(sign) == before
    assert f"stopped by {sign.name}; the same command goes on" in capsys.readouterr().out


def test_a_folder_without_peers_is_refused_at_once(monkeypatch, started, tmp_path) -> None:
    known(monkeypatch, "optimizer")
    with pytest.raises(ValueError, match="^--peers: got '.*' with 0 archives, accepted: a folder with transformer_eng"):
        results_measure.measure(results_page.parse(["--measure", "--peers", str(tmp_path)]))
    assert not started


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

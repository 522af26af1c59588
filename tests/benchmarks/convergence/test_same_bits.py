"""An earlier commit's code trains beside the present one: what is compared, and what is said."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from benchmarks.common import ROOT
from benchmarks.convergence import same_bits


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Two commits of one file."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    root = tmp_path / "repository"
    root.mkdir()
    monkeypatch.setattr(same_bits, "ROOT", root)
    git = "git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(root)
    subprocess.run([*git, "init", "-q"], check=True)
    for text in ("then", "now"):
        (root / "code.py").write_text(text)
        subprocess.run([*git, "add", "code.py"], check=True)
        subprocess.run([*git, "commit", "-qm", text], check=True)
    return root


def test_files_are_those_of_the_commit(repository, tmp_path) -> None:
    assert (same_bits.unpack("HEAD~1", tmp_path / "a") / "code.py").read_text() == "then"
    assert (same_bits.unpack("HEAD", tmp_path / "b") / "code.py").read_text() == "now"
    with pytest.raises(ValueError, match="^--commit: got 'nowhere', accepted: a commit in the history of repository"):
        same_bits.unpack("nowhere", tmp_path / "c")


@pytest.mark.parametrize("now, first", [(2.0, None), (2.0000000000000004, 2)])
def test_one_bit_is_a_difference(repository, tmp_path, monkeypatch, capsys, now, first) -> None:
    def train(root, data, folder, steps, seed):
        assert (steps, seed) == (3, 1) and folder.is_dir()
        second = now if (root / "code.py").read_text() == "now" else 2.0
        return [{"loss": loss, "grad_norm": 1.0} for loss in (3.0, second, 1.0)]

    monkeypatch.setattr(same_bits, "train", train)
    monkeypatch.setattr(same_bits, "prepare", lambda folder, size: str(folder / "text"))
    same_bits.main(["--commit", "HEAD~1", "--steps", "3", "--seed", "1", "--output", str(tmp_path)])
    found = json.loads((tmp_path / "convergence/same-bits.json").read_text())
    assert found["first_difference"] == first and found["then"][1]["loss"] == 2.0 and found["now"][1]["loss"] == now
    assert f"differs from step {first}" * bool(first) in capsys.readouterr().out


def test_the_commit_is_that_of_the_losses() -> None:
    losses = json.loads((ROOT / "benchmarks/results/convergence/branches.json").read_text())
    assert losses["environment"]["commit"].startswith(same_bits.parse([]).commit)


@pytest.mark.slow
def test_a_run_is_repeated_to_the_bit(tmp_path) -> None:
    data = same_bits.prepare(tmp_path, same_bits.TINY)
    runs = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / name).mkdir()
        runs.append(same_bits.train(ROOT, data, tmp_path / name, 3, seed))
    assert runs[0] == runs[1] != runs[2] and len(runs[0]) == 3

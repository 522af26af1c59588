"""The wheel, and programs started by their path: what they find of the project, and what nobody
else may find of it.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

from coat_dist import CoatConfigError
from launch.common.find_config import find_config
from tests.support import slow

ROOT = Path(__file__).parents[2]
PROGRAMS = ("pretrain", "convert_hf", "planner", "prepare_data", "to_universal", "plot")
CONFIGS = {
    kind: sorted(p.name for p in (ROOT / "configs" / kind).glob("*.json"))
    for kind in ("models", "deepspeed")
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A virtual environment with the wheel that is built from the sdist, as `python -m build` does.
    It is built from a copy: building writes beside setup.py.
    """
    work = tmp_path_factory.mktemp("wheel")
    for folder in ("coat_dist", "megatron_patches", "launch", "configs", "tests", "benchmarks"):
        shutil.copytree(
            ROOT / folder,
            work / "src" / folder,
            ignore=shutil.ignore_patterns("__pycache__", "results"),
        )
    for file in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, work / "src")

    def python(*arguments, cwd=work):
        line = [sys.executable, *map(str, arguments)]
        done = subprocess.run(line, cwd=cwd, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    python(
        "-c", "from setuptools import build_meta; build_meta.build_sdist('..')", cwd=work / "src"
    )
    (sdist,) = work.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        folders = {name.split("/")[1] for name in archive.getnames() if name.count("/") > 1}
        assert folders == {
            "coat_dist",
            "coat_dist.egg-info",
            "configs",
            "launch",
            "megatron_patches",
        }
    quiet = "--quiet", "--no-deps", "--no-index"
    python("-m", "pip", "wheel", *quiet, "--no-build-isolation", sdist)
    python("-m", "venv", "--without-pip", "env")
    python("-m", "pip", "--python", "env", "install", *quiet, next(work.glob("*.whl")))
    (packages,) = work.glob("env/lib/*/site-packages")
    return packages


def run(*command, folder, path):
    """A program in a folder that has nothing to do with the project."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_the_wheel_has_the_configurations_and_no_package_of_a_generic_name(installed):
    packages = {p.name for p in installed.iterdir() if p.suffix != ".dist-info"}
    assert packages == {"coat_dist", "launch", "megatron_patches"}
    for kind, names in CONFIGS.items():
        assert sorted(p.name for p in (installed / "launch/configs" / kind).iterdir()) == names
    for folder in ("coat_dist", "launch", "megatron_patches"):
        ours = {p.relative_to(ROOT) for p in (ROOT / folder).rglob("*.py")}
        assert ours == {p.relative_to(installed) for p in (installed / folder).rglob("*.py")}
    assert all(
        (installed / name / "py.typed").exists() for name in ("coat_dist", "megatron_patches")
    )


def test_installed_programs_find_the_package_and_its_configurations(installed, tmp_path):
    here = {"folder": tmp_path, "path": [sysconfig.get_path("purelib")]}  # torch and the like
    scripts = installed.parents[2] / "bin"
    report = run(scripts / "python", "-m", "coat_dist.report", **here)
    assert report.returncode == 0, report.stdout + report.stderr
    assert {p.name for p in scripts.glob("coat-*")} == {
        f"coat-{p.stem.replace('_', '-')}"
        for p in (ROOT / "launch").glob("*.py")
        if '__name__ == "__main__"' in p.read_text()
    }
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("some words " * 99)
    more = "--input", "text", "--output", "data", "--tokenizer", "bytes", "--workers", "2"
    prepared = run(scripts / "coat-prepare-data", *more, **here)
    assert prepared.returncode == 0, prepared.stdout + prepared.stderr
    settings = "--model", "tiny", "--deepspeed_config", "zero2", "--data", "nowhere"
    for program in (
        [scripts / "coat-pretrain"],
        [scripts / "python", installed / "launch/pretrain.py"],
    ):
        ended = run(*program, *settings, "--train-steps", "1", **here)
        assert ended.returncode == 2  # both files were read, for data comes next
        assert ended.stderr.splitlines()[-1].startswith("error: --data: nowhere.bin does not exist")


def test_a_file_comes_before_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for given in ("tiny", "tiny.json", "models/tiny.json", Path("configs/models/tiny.json")):
        assert find_config("--model", given, "models").samefile(ROOT / "configs/models/tiny.json")
    (tmp_path / "tiny").mkdir()  # a folder is no description
    assert find_config("--model", "tiny", "models").samefile(ROOT / "configs/models/tiny.json")
    (tmp_path / "tiny.json").write_text("{}")
    assert find_config("--model", "tiny.json", "models").samefile(tmp_path / "tiny.json")
    for kind, option in (("models", "--model"), ("deepspeed", "--deepspeed_config")):
        accepted = ", ".join(sorted(name.removesuffix(".json") for name in CONFIGS[kind]))
        for given in ("tinny", "deepspeed/tiny.json", str(tmp_path / "zero2.json"), "", "x" * 5000):
            with pytest.raises(CoatConfigError) as problem:
                find_config(option, given, kind)
            assert str(problem.value).startswith(
                f"{option}: got {given}, accepted: a file, or one of "
            )
            assert str(problem.value).partition(" (did you mean ")[0].endswith(f": {accepted}")


LOOK = """
import atexit, importlib.util, json, os, sys

def look():
    names = ("data", "model", "plot", "prep", "pretrain", "prepare_data", "training", "launch",
             "coat_dist")
    found = {name: importlib.util.find_spec(name) for name in names}
    with open(os.environ["FOUND"], "w") as file:
        json.dump({name: spec and spec.origin for name, spec in found.items()}, file)

atexit.register(look)
"""


@pytest.mark.parametrize("name", [PROGRAMS[0], *map(slow, PROGRAMS[1:])])
def test_a_program_started_by_its_path_finds_the_project_and_offers_none_of_its_folders(
    name, tmp_path, monkeypatch
):
    """From a clone, whether it is installed or not."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(LOOK)
    (tmp_path / "site/data.py").write_text("")  # somebody's own module
    monkeypatch.setenv("FOUND", str(tmp_path / "found.json"))
    program = sys.executable, ROOT / "launch" / f"{name}.py"
    ended = run(*program, "--help", folder=tmp_path, path=[tmp_path / "site"])
    assert ended.returncode == 0, ended.stderr
    assert "--log-level" in ended.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    assert Path(found.pop("data")) == tmp_path / "site/data.py"
    ours = {
        "launch": str(ROOT / "launch/__init__.py"),
        "coat_dist": str(ROOT / "coat_dist/__init__.py"),
    }
    assert found == ours | dict.fromkeys(found.keys() - ours.keys())

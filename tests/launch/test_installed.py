"""The wheel, and programs started by their path: what they find of the project, and what nobody
else may find of it.
"""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from coat_dist import CoatConfigError
from launch.find_config import find_config

ROOT = Path(__file__).parents[2]
PROGRAMS = (
    *("pretrain", "convert_hf", "planner"),
    *("prepare_data", "index_tokens", "to_universal", "plot"),
)
CONFIGS = {
    kind: sorted(p.name for p in (ROOT / "configs" / kind).glob("*.json"))
    for kind in ("models", "deepspeed")
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with what the wheel installs. It is built from a copy: building writes beside
    setup.py.
    """
    work = tmp_path_factory.mktemp("wheel")
    for folder in ("coat_dist", "megatron_patches", "launch", "configs", "tests", "benchmarks"):
        shutil.copytree(
            ROOT / folder,
            work / "src" / folder,
            ignore=shutil.ignore_patterns("__pycache__", "results"),
        )
    for file in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, work / "src")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    built = subprocess.run(
        [*command, "--wheel-dir", work, work / "src"], capture_output=True, text=True
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = work.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(work / "installed")
    return work / "installed"


def run(program, *arguments, folder, path):
    """One of our programs, by its path, in a folder that has nothing to do with the project."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, str(program), *map(str, arguments)]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )


def test_the_wheel_has_the_configurations_and_no_package_of_a_generic_name(installed):
    packages = {p.name for p in installed.iterdir() if p.suffix != ".dist-info"}
    assert packages == {"coat_dist", "launch", "megatron_patches"}
    for kind, names in CONFIGS.items():
        assert sorted(p.name for p in (installed / "launch/configs" / kind).iterdir()) == names
    for folder in ("coat_dist", "launch", "megatron_patches"):
        ours = {p.relative_to(ROOT) for p in (ROOT / folder).rglob("*.py")}
        assert ours == {p.relative_to(installed) for p in (installed / folder).rglob("*.py")}


def test_an_installed_program_finds_configurations_from_an_empty_folder(installed, tmp_path):
    more = [
        "--model",
        "llama2-7b",
        "--deepspeed_config",
        "zero2",
        "--data",
        "nowhere",
        "--train-steps",
        "1",
    ]
    ended = run(installed / "launch/pretrain.py", *more, folder=tmp_path, path=[installed])
    assert ended.returncode == 2  # both were read, for data comes next
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


def test_workers_of_prepare_data_import_no_torch():
    """They import the program again, each of them: seconds of work for nothing."""
    look = (
        "import launch.prepare_data, sys; print([m for m in ('torch', 'megatron', 'deepspeed') "
        "if m in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", look], cwd=ROOT, capture_output=True, text=True)
    assert ended.stdout == "[]\n", ended.stderr


@pytest.mark.parametrize(
    "name", [PROGRAMS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in PROGRAMS[1:])]
)
def test_a_program_started_by_its_path_finds_the_project_and_offers_none_of_its_folders(
    name, tmp_path, monkeypatch
):
    """From a clone, whether it is installed or not."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(LOOK)
    (tmp_path / "site/data.py").write_text("")  # somebody's own module
    monkeypatch.setenv("FOUND", str(tmp_path / "found.json"))
    ended = run(ROOT / "launch" / f"{name}.py", "--help", folder=tmp_path, path=[tmp_path / "site"])
    assert ended.returncode == 0, ended.stderr
    assert "--log-level" in ended.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    assert Path(found.pop("data")) == tmp_path / "site/data.py"
    ours = {
        "launch": str(ROOT / "launch/__init__.py"),
        "coat_dist": str(ROOT / "coat_dist/__init__.py"),
    }
    assert found == ours | dict.fromkeys(found.keys() - ours.keys())

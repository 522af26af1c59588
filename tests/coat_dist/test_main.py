"""``python -m coat_dist PROGRAM``: the program runs as by itself, with DeepSpeed's initialize
honouring the block.
"""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import coat_dist
from coat_dist.__main__ import USAGE

PROGRAM = """
import json, pickle, subprocess, sys
class Mine: pass
assert __name__ == "__main__" and pickle.loads(pickle.dumps(Mine())).__class__ is Mine
honoured = (
    "import deepspeed, json; "
    "print(json.dumps(hasattr(deepspeed, 'initialize_without_coat')))"
)
child = [sys.executable, "-c", honoured]
quiet = [sys.executable, "-c", "import sys, json; print(json.dumps('coat_dist' in sys.modules))"]
import deepspeed
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "file": __file__,
    "honoured": hasattr(deepspeed, "initialize_without_coat"),
    "child": [json.loads(subprocess.run(
                  c, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
              for c in (child, quiet)],
}))
"""


def run(folder, *arguments, **environment):
    line = [sys.executable, "-m", "coat_dist", *map(str, arguments)]
    done = subprocess.run(
        line, cwd=folder, env=os.environ | environment, capture_output=True, text=True
    )
    return done, (json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None)


@pytest.mark.long
def test_main_runs_files_modules_and_their_children(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "train.py").write_text(PROGRAM)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import os; os.environ['SEEN'] = 'yes'")
    done, found = run(tmp_path, "--local_rank=3", "sub/train.py", "-m", "x")
    assert done.returncode == 0, done.stderr
    assert found["argv"] == ["sub/train.py", "--local_rank=3", "-m", "x"] and found["path"] == str(
        tmp_path / "sub"
    )
    assert found["honoured"] and found["child"] == [True, False], (
        "only what imports DeepSpeed imports coat_dist"
    )
    done, found = run(tmp_path, "-m", "sub.train", "--flag")
    assert done.returncode == 0, done.stderr
    assert found["argv"][1:] == ["--flag"] and found["path"] == str(tmp_path) and found["honoured"]


RANK = """
import json, os, pickle, sys
import deepspeed, torch
class Mine: pass
def work(given):
    return type(given).__name__
if __name__ == "__main__":
    with torch.multiprocessing.get_context("spawn").Pool(1) as pool:
        worked = pool.map(work, [Mine()])
    honoured = hasattr(deepspeed, "initialize_without_coat")
    found = os.environ["LOCAL_RANK"], sys.argv[1:], sys.path[0], honoured, worked
    open("rank" + found[0], "w").write(json.dumps(found))
"""
COAT, TORCHRUN = ["-m", "coat_dist"], ["-m", "torch.distributed.run", "--nproc-per-node=2"]
DEEPSPEED = ["-m", "deepspeed.launcher.runner", "--num_gpus=2"]
ACCELERATE = [
    "-m",
    "accelerate.commands.launch",
    "--use_deepspeed",
    "--deepspeed_config_file=ds.json",
]
ACCELERATE += ["--num_processes=2", "--num_machines=1"]
LAUNCHERS = {
    "torchrun": [*TORCHRUN, *COAT, "train.py"],
    "under torchrun": [*COAT, *TORCHRUN, "train.py"],
    "deepspeed": [*DEEPSPEED, "--module", "coat_dist", "-m", "train"],
    "under deepspeed": [*COAT, *DEEPSPEED, "train.py"],
    "under accelerate": [*COAT, *ACCELERATE, "train.py"],
}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_main_under_launchers(launcher, tmp_path):
    (tmp_path / "train.py").write_text(RANK)
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 1}')
    line = [sys.executable, *LAUNCHERS[launcher], "-m", "x"]
    paths = os.pathsep.join(
        [str(Path(coat_dist.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    )
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": paths}
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for rank in "01":
        given = [f"--local_rank={rank}"] if "deepspeed" in launcher else []
        found = json.loads((tmp_path / f"rank{rank}").read_text())
        assert found == [rank, [*given, "-m", "x"], str(tmp_path), True, ["Mine"]]


FACTS = """
import dataclasses, sys
@dataclasses.dataclass
class Options:
    epochs: int = 3
main = sys.modules["__main__"]
print(sys.argv, sys.path[0], main.__builtins__, getattr(main, "__file__", None), main.__package__)
print(main.__spec__ and main.__spec__.name, dataclasses.fields(Options)[0].type)
sys.exit(7)
"""
WAYS = [
    "train.py",
    "./sub/../link.py",
    "folder",
    "train.pyz",
    "-P train.py",
    "-P folder",
    "-m train",
    "-m folder",
    "-c",
]


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_main_runs_a_program_as_python_does(way, tmp_path):
    for name in ("train.py", "sub/linked.py", "folder/__main__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(FACTS)
    (tmp_path / "link.py").symlink_to("sub/linked.py")
    with zipfile.ZipFile(tmp_path / "train.pyz", "w") as file:
        file.writestr("__main__.py", FACTS)
    *safe, program = way.split(" ", way.startswith("-P"))
    given = ["-c", FACTS] if program == "-c" else program.split()
    lines = [[sys.executable, *safe, *under, *given, "-x"] for under in ([], COAT)]
    alone, found = (
        subprocess.run(one, cwd=tmp_path, capture_output=True, text=True) for one in lines
    )
    assert (found.stdout, found.returncode) == (alone.stdout, 7), found.stderr


@pytest.mark.long
def test_main_finds_a_command_beside_a_folder(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "tool").mkdir()
    (tmp_path / "bin" / "tool").write_text("import sys; print(len(sys.argv))")
    (tmp_path / "bin" / "tool").chmod(0o755)
    done, found = run(
        tmp_path, "tool", "x", PATH=f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    )
    assert found == 2, done.stderr


@pytest.mark.long
def test_main_leaves_children_of_other_environments_alone(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    next(tmp_path.glob("env/lib/*/site-packages")).joinpath("deepspeed.py").touch()
    child = [str(tmp_path / "env" / "bin" / "python"), "-c", "import deepspeed; print(1)"]
    (tmp_path / "train.py").write_text(f"import subprocess; subprocess.run({child}, check=True)")
    done, found = run(tmp_path, "train.py")
    assert found == 1, done.stderr


MISSING = f"{sys.executable}: No module named missing\n"
NOTHING = (
    "python -m coat_dist: got 'nothing.py', accepted: a Python file, a folder or zip file "
    "with __main__.py, or a "
)
NOTHING += "command that is a Python script\n"


@pytest.mark.parametrize(
    "arguments, text", [(["nothing.py"], NOTHING), (["-m", "missing"], MISSING), ([], f"{USAGE}\n")]
)
def test_main_names_what_it_cannot_run(arguments, text, tmp_path):
    done, _ = run(tmp_path, *arguments)
    assert (done.returncode, done.stderr) == (1, text)

"""``python -m coat_dist PROGRAM``: the program runs as by itself, with DeepSpeed's initialize honouring the block."""

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json, pickle, subprocess, sys
class Mine: pass
assert __name__ == "__main__" and pickle.loads(pickle.dumps(Mine())).__class__ is Mine
honoured = "import deepspeed, json; print(json.dumps(hasattr(deepspeed, 'initialize_without_coat')))"
child = [sys.executable, "-c", honoured]
quiet = [sys.executable, "-c", "import sys, json; print(json.dumps('coat_dist' in sys.modules))"]
import deepspeed
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "file": __file__, "honoured": hasattr(deepspeed, "initialize_without_coat"),
    "child": [json.loads(subprocess.run(c, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
              for c in (child, quiet)],
}))
"""


def run(folder, *arguments, **environment):
    line = [sys.executable, "-m", "coat_dist", *map(str, arguments)]
    done = subprocess.run(line, cwd=folder, env=os.environ | environment, capture_output=True, text=True)
    return done, (json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None)


@pytest.mark.long
def test_a_file_a_module_and_their_children(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "train.py").write_text(PROGRAM)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import os; os.environ['SEEN'] = 'yes'")
    done, found = run(tmp_path, "--local_rank=3", "sub/train.py", "-m", "x")
    assert done.returncode == 0, done.stderr
    assert found["argv"] == ["sub/train.py", "--local_rank=3", "-m", "x"] and found["path"] == str(tmp_path / "sub")
    assert found["honoured"] and found["child"] == [True, False], "only what imports DeepSpeed imports coat_dist"
    done, found = run(tmp_path, "-m", "sub.train", "--flag")
    assert done.returncode == 0, done.stderr
    assert found["argv"][1:] == ["--flag"] and found["path"] == str(tmp_path) and found["honoured"]


def test_what_cannot_be_run_is_named(tmp_path):
    for arguments, text in ((("nothing.py",), "got 'nothing.py'"), (("-m", "no.thing"), "no"), ((), "usage")):
        done, _ = run(tmp_path, *arguments)
        assert done.returncode and text in done.stderr

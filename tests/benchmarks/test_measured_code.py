"""Which code a result was measured with: every definition that a part reaches, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import measured_code
from benchmarks.measured_code import PARTS, Code

FILES = {
    "coat_dist/__init__.py": "from .optim import CoatAdamW\n",
    "coat_dist/optim/__init__.py": "from .adamw import CoatAdamW\n",
    "coat_dist/optim/adamw.py": (
        "from ..ops import step\nfrom .group_keys import check_keys\n\n\nclass CoatAdamW:\n    def step(self):\n"
        "        from . import later\n\n        return step(later.WHEN)\n"
    ),
    "coat_dist/optim/group_keys.py": "def check_keys(group):\n    pass\n",
    "coat_dist/optim/later.py": "WHEN = 1\nNEVER = 2\n",
    "coat_dist/ops/__init__.py": (
        "from ..reference import sums\n\nstep, other = operation(sums.step), operation(sums.other)\n"
    ),
    "coat_dist/reference/__init__.py": "",
    "coat_dist/reference/sums.py": "def step(x):\n    return x\n\n\ndef other(x):\n    return x\n",
    "coat_dist/kernels/__init__.py": "",
    "coat_dist/kernels/sums.py": "from .parts import step\n",
    "coat_dist/kernels/parts.py": (
        "import triton\n\nfrom . import shared\n\nWARPS: int = 4\nWIDE = 8\n\n\n@triton.jit\ndef step(x):\n"
        "    return shared.used(x, WARPS)\n"
    ),
    "coat_dist/kernels/shared.py": "def used(x, n):\n    return x\n\n\ndef unused(x):\n    return x\n",
    "coat_dist/flow/norm.py": "from ..kernels.shared import unused as u\n\nfor one in range(3):\n    print(u)\n",
    "coat_dist/flow/linear.py": "from .cuda_graphs import graphed\n\nLINEAR = graphed\n",
    "coat_dist/flow/cuda_graphs.py": "from .graph_pool import POOL\n\ngraphed = POOL\n",
    "coat_dist/flow/graph_pool.py": "POOL = 1\n",
    "megatron_patches/cuda_graphs.py": "",
    "coat_dist/deepspeed/step.py": "A = 1\n",
    **{f"coat_dist/deepspeed/{name}.py": "" for name in ("cached_weights", "fp8_gather", "pipeline")},
    **{f"coat_dist/deepspeed/{name}.py": "" for name in ("master_weights", "replicated_grads", "round_robin")},
    "coat_dist/optim/groups.py": "from .later import NEVER as N\n\n\ndef param_groups():\n    return N\n",
    **{f"megatron_patches/{name}.py": "" for name in ("optimizer", "pipeline", "replicated_grads")},
    "megatron_patches/__init__.py": "",
    "megatron_patches/patch.py": "def patch(model):\n    return model\n",
    "megatron_patches/spec.py": "",
}
"""Made up, with the library's entries."""


@pytest.fixture
def library(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    "file, old, new, outdated",
    [
        ("optim/adamw.py", "return step", "return 2 * step", {"optimizer"}),
        (
            "optim/adamw.py",
            "    def step(self):\n",
            "    def step(self):\n        check_keys(\n            {})\n",
            set(),
        ),
        (
            "optim/adamw.py",
            "    def step(self):\n",
            "    def step(self):\n        found = check_keys({})\n",
            {"optimizer"},
        ),
        ("optim/group_keys.py", "pass", "return 1", set()),
        ("optim/later.py", "WHEN = 1", "WHEN = 3", {"optimizer"}),  # imported where it is used
        ("optim/later.py", "NEVER = 2", "NEVER = 3", {"training"}),
        ("reference/sums.py", "step(x):\n    return x", "step(x):\n    return -x", {"optimizer"}),
        ("reference/sums.py", "other(x):\n    return x", "other(x):\n    return -x", {"optimizer"}),  # one statement
        ("kernels/parts.py", "WARPS: int = 4", "WARPS: int = 8", {"optimizer"}),  # by the operation's name
        ("kernels/parts.py", "@triton.jit", "@triton.jit(noinline=True)", {"optimizer"}),
        ("kernels/parts.py", "WIDE = 8", "WIDE = 9", set()),
        ("kernels/shared.py", "used(x, n):\n    return x", "used(x, n):\n    return n", {"optimizer"}),
        ("kernels/shared.py", "unused(x):\n    return x", "unused(x):\n    return -x", {"flow"}),
        ("kernels/shared.py", "def used", "print(1)\n\n\ndef used", {"optimizer", "flow"}),  # runs with the import
        ("kernels/shared.py", "    return x", '    """Words."""\n    # more\n    return x', set()),
        ("flow/norm.py", "range(3)", "range(4)", {"flow"}),
        ("flow/graph_pool.py", "POOL = 1", "POOL = 2", {"graphs"}),  # though a file of the flow names it
        ("deepspeed/step.py", "A = 1", "A = 2", {"deepspeed"}),
        ("deepspeed/pipeline.py", "", "B = 2", {"deepspeed"}),
    ],
)
def test_a_change_outdates_the_parts_that_reach_it(library, file, old, new, outdated) -> None:
    before = measured_code.digests.__wrapped__(library)
    path = library / "coat_dist" / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    after = measured_code.digests.__wrapped__(library)
    assert {part for part in PARTS if before[part] != after[part]} == outdated
    assert {len(one) for one in after.values()} == {12}


def test_a_new_step_file_belongs_to_it_and_a_renamed_one_is_missed(library) -> None:
    folder = library / "coat_dist/deepspeed"
    before = measured_code.digests.__wrapped__(library)
    (folder / "step_graph.py").write_text("C = 1\n")
    assert measured_code.digests.__wrapped__(library)["deepspeed"] != before["deepspeed"]
    (folder / "fp8_gather.py").rename(folder / "fp8_gathers.py")
    with pytest.raises(ValueError, match="^PARTS: got coat_dist/deepspeed/fp8_gather.py, accepted"):
        measured_code.digests.__wrapped__(library)


def test_the_digests_of_another_checkout(library, capsys) -> None:
    (library / "coat_dist/deepspeed/pipeline.py").unlink()
    measured_code.main([str(library)])
    lines = capsys.readouterr().out.splitlines()
    code = Code(library)
    assert lines[:2] == [f"{part}: {code.digest(part)}" for part in ("optimizer", "flow")]
    assert lines[2].startswith("PARTS: got coat_dist/deepspeed/pipeline.py, accepted: files of ")
    assert lines[3] == f"training: {code.digest('training')}"


def test_every_kernel_and_definition_is_reached_by_a_part() -> None:
    """Or a change of it would outdate nothing."""
    code = Code()
    reached = set().union(*(code.reached(code.entries(part)) for part in PARTS))
    rooms = "coat_dist.flow", "coat_dist.kernels", "coat_dist.ops", "coat_dist.reference"
    missed = {
        f"{name}.{one}"
        for name, module in code.modules.items()
        for one in module.named
        if name.startswith(rooms) and one != "__all__" and (name, one) not in reached
    }
    assert missed == {"coat_dist.kernels.launch.forget"}, "what tests alone call"


def test_what_is_not_followed_is_there() -> None:
    code = Code()
    for name in measured_code.NOT_COMPUTED:
        module, _, definition = name.rpartition(".")
        assert name in code.modules or definition in code.modules[module].named, f"NOT_COMPUTED: {name} was renamed"


def test_parts_are_told_apart() -> None:
    code = Code()
    modules = {part: {module for module, _ in code.reached(code.entries(part))} for part in PARTS}
    assert "coat_dist.kernels.adamw" in modules["optimizer"] and "coat_dist.kernels.norm" not in modules["optimizer"]
    assert "coat_dist.kernels.norm" in modules["flow"] and "coat_dist.kernels.adamw" not in modules["flow"]
    assert "coat_dist.deepspeed.config.table" not in set().union(*modules.values())
    assert not any(module.startswith(("launch", "benchmarks")) for found in modules.values() for module in found)
    assert measured_code.digests() == measured_code.digests.__wrapped__(Path(__file__).parents[2])


def test_what_a_program_says_in_words_does_not_count() -> None:
    source = '''"""A module."""
import torch  # noqa

LIMIT = 3  # elements
"""Of what."""


class Kernel:
    """Two
    lines: # no comment."""

    name: str
    """Field."""

    def run(self, x):
        # why
        """Runs."""
        return f"# {x}" + "#" + """kept # as
 it is"""
'''
    plain = "import torch\nLIMIT = 3\nclass Kernel:\n    name: str\n    def run(self, x):\n"
    plain += '        return f"# {x}" + "#" + """kept # as\n it is"""'
    assert measured_code.without_words(source) == plain
    assert measured_code.without_words(source.replace("LIMIT = 3", "LIMIT = 4")) != plain


def test_a_folder_without_the_library(tmp_path, capsys) -> None:
    with pytest.raises(SystemExit):
        measured_code.main([str(tmp_path)])
    assert "accepted: a folder with coat_dist and megatron_patches" in capsys.readouterr().err

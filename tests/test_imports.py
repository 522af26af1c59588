"""Imports go one way between folders and in no circle between files; the optimizer needs torch and
pydantic only.

All imports are read from the source, also those inside functions.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("coat_dist", "megatron_patches", "launch", "benchmarks")

LAYERS = (
    ("launch", "benchmarks"),
    ("megatron_patches", "coat_dist.children"),
    ("coat_dist", "coat_dist.report", "coat_dist.__main__"),
    ("coat_dist.deepspeed",),
    ("coat_dist.checkpoint", "coat_dist.hf"),
    ("coat_dist.patching",),
    ("coat_dist.optim", "coat_dist.flow"),
    ("coat_dist.ops",),
    ("coat_dist.kernels",),
    ("coat_dist.reference",),
    ("coat_dist.devices",),
    ("coat_dist.ranks",),
    ("coat_dist.nodes",),
    ("coat_dist.config",),
    ("coat_dist.formats", "coat_dist.config_errors"),
)
"""A room imports itself and rooms of the rows below it. Of rooms in one row none imports
another.
"""
SAME_ROW = {("benchmarks", "launch")}
"""But benchmarks build their models as ``launch`` does."""
MAY_IMPORT = {
    "deepspeed": ("coat_dist.deepspeed", "coat_dist.checkpoint", "launch", "benchmarks.speed.hf"),
    "megatron": ("megatron_patches", "launch", "benchmarks"),
}


class Import(NamedTuple):
    importer: str
    imported: str
    line: int

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PATHS = {module_name(p): p for folder in FOLDERS for p in sorted((ROOT / folder).rglob("*.py"))}


def read(name: str, path: Path) -> Iterator[Import]:
    """The imports of one file, each by the deepest module that it names."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]

    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(name, alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join(
                    [*parents[: len(parents) - node.level + 1], *([base] if base else [])]
                )
            for alias in node.names:
                deeper = f"{base}.{alias.name}"
                yield Import(name, deeper if deeper in PATHS else base, node.lineno)


IMPORTS = [found for name, path in PATHS.items() for found in read(name, path)]


def room(module: str) -> str:
    """The longest name in ``LAYERS`` that the module lies in."""
    names = [
        name for row in LAYERS for name in row if module == name or module.startswith(name + ".")
    ]
    return max(names, key=len)


def row(name: str) -> int:
    return next(i for i, names in enumerate(LAYERS) if name in names)


def test_every_module_has_a_room():
    assert [m for m in PATHS if m.startswith("coat_dist.") and room(m) == "coat_dist"] == []
    assert len(IMPORTS) > 500


def test_rooms_import_one_way():
    wrong = []
    for found in IMPORTS:
        if found.imported.split(".")[0] not in FOLDERS:
            continue
        above, below = room(found.importer), room(found.imported)
        if above != below and (above, below) not in SAME_ROW and row(above) >= row(below):
            wrong.append(str(found))
    assert wrong == []


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_who_imports_deepspeed_and_megatron(package):
    users = {f.importer: f for f in IMPORTS if f.imported.split(".")[0] == package}
    rooms = tuple(f"{name}." for name in MAY_IMPORT[package])
    wrong = [str(f) for name, f in users.items() if not f"{name}.".startswith(rooms)]
    assert users and wrong == []


def test_setup_names_every_package_that_is_imported():
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    requires = re.search(r"REQUIRES = \[(.*?)\n\]", setup, re.DOTALL)[1]
    # Of programs that say so where it lacks.
    extra = re.search(r"^HF = \[(.*?)\]", setup, re.DOTALL | re.MULTILINE)[1]
    named = {
        {"megatron-core": "megatron", "pyyaml": "yaml"}.get(name, name)
        for name in re.findall(r'^    "([\w-]+)', requires, re.MULTILINE)
    }
    named |= set(re.findall(r'"([\w-]+)', extra))
    named |= {"pydantic_core"}  # comes with pydantic
    imported = {
        f.imported.split(".")[0]: str(f) for f in IMPORTS if not f.importer.startswith("benchmarks")
    }
    named |= {"wandb"}  # an extra, with an error that names it
    unnamed = imported.keys() - named - set(FOLDERS) - sys.stdlib_module_names
    assert [imported[name] for name in unnamed] == []
    assert len(named) > 10


def test_no_circle_of_files():
    graph: dict[str, set[str]] = {name: set() for name in PATHS}
    for found in IMPORTS:
        if found.imported in PATHS and found.imported != found.importer:
            graph[found.importer].add(found.imported)
    done: set[str] = set()
    circles: list[str] = []

    def follow(name: str, way: list[str]) -> None:
        if name in way:
            circles.append(" -> ".join([*way[way.index(name) :], name]))
        elif name not in done:
            for other in sorted(graph[name]):
                follow(other, [*way, name])
            done.add(name)

    for name in graph:
        follow(name, [])
    assert circles == []


def test_the_optimizer_runs_where_torch_is_all_there_is():
    program = """
        import sys

        class Missing:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in (
                    "deepspeed", "megatron", "triton", "transformer_engine", "apex"
                ):
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        sys.meta_path.insert(0, Missing())
        import torch
        import coat_dist
        from coat_dist import CoatAdamW, param_groups
        from coat_dist.optim import export_moments, fp32_state_dict

        torch.manual_seed(0)
        layers = torch.nn.Linear(64, 96), torch.nn.LayerNorm(96), torch.nn.Linear(96, 64)
        net = torch.nn.Sequential(*layers)
        x = torch.randn(32, 64)

        def train(optimizer):
            losses = []
            for _ in range(5):
                loss = (net(x) - x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            return losses

        optimizer = CoatAdamW(param_groups(net, weight_decay=0.1), lr=1e-2)
        first = train(optimizer)
        saved = optimizer.state_dict()
        with fp32_state_dict(optimizer):
            optimizer.state_dict()
        again = CoatAdamW(param_groups(net, weight_decay=0.1), lr=1e-2)
        again.load_state_dict(saved)
        more = train(again)
        assert more[-1] < first[-1] < first[0], (first, more)
        weight = net[0].weight
        group = next(g for g in again.param_groups if any(p is weight for p in g["params"]))
        moments = export_moments(weight, again.state[weight], group)
        assert group["moments"] == "fp8" and all(m.any() for m in moments)
        loaded = {name.split(".")[0] for name in sys.modules}
        assert not loaded & {"deepspeed", "megatron", "triton"}, loaded
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_compiler_and_triton_are_imported_when_they_are_needed():
    """They take longer than all the rest; and tests set Triton's interpreter in the environment
    after `coat_dist`.
    """
    program = (
        "import coat_dist, sys; assert not {'torch._dynamo', 'triton', 'deepspeed'} & "
        "set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr

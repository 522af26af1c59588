"""Imports go one way between folders and in no circle between files; a plain install has all that
the optimizer needs.

All imports are read from the source, also those inside functions.
"""

from __future__ import annotations

import ast
import functools
import runpy
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
FOLDERS = ("coat_dist", "megatron_patches", "launch", "benchmarks")

LAYERS = (
    ("launch", "benchmarks"),
    ("megatron_patches", "coat_dist.children"),
    ("megatron_patches.parallel",),
    ("megatron_patches.patch",),
    ("megatron_patches.layers",),
    ("megatron_patches.config", "megatron_patches.groups"),
    ("megatron_patches.compat",),
    ("megatron_patches.cpu",),
    ("coat_dist", "coat_dist.report", "coat_dist.__main__"),
    ("coat_dist.deepspeed",),
    ("coat_dist.deepspeed.parallel",),
    ("coat_dist.deepspeed.step",),
    ("coat_dist.checkpoint", "coat_dist.hf"),
    ("coat_dist.patching",),
    ("coat_dist.settings",),
    ("coat_dist.known_keys", "coat_dist.refused"),
    ("coat_dist.optim", "coat_dist.flow"),
    ("coat_dist.flow.blocks", "coat_dist.flow.graphs"),
    ("coat_dist.flow.core",),
    ("coat_dist.flow.parallel",),
    ("coat_dist.flow.function",),
    ("coat_dist.ops",),
    ("coat_dist.kernels",),
    ("coat_dist.reference",),
    ("coat_dist.devices",),
    ("coat_dist.shared_folders",),
    ("coat_dist.ranks",),
    ("coat_dist.nodes",),
    ("coat_dist.config",),
    ("coat_dist.formats", "coat_dist.config_errors", "coat_dist.extras"),
)
"""A room imports itself and rooms of the rows below it. Of rooms in one row none imports
another.
"""
SAME_ROW = {("benchmarks", "launch")}
"""But benchmarks build their models as ``launch`` does."""
MAY_IMPORT = {
    "deepspeed": (
        "coat_dist.deepspeed",
        "coat_dist.known_keys",
        "coat_dist.checkpoint",
        "launch",
        "benchmarks.speed.hf",
    ),
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


@functools.cache
def requirements() -> dict[str, list[Requirement]]:
    """Of setup.py: those of a plain install by "", others by their extra."""
    with mock.patch("setuptools.setup") as setup:
        runpy.run_path(str(ROOT / "setup.py"))
    given = setup.call_args.kwargs
    lists = {"": given["install_requires"], **given["extras_require"]}
    return {extra: list(map(Requirement, lines)) for extra, lines in lists.items()}


def modules(*extras: str) -> set[str]:
    """What packages of extras are imported as."""
    other = {"megatron-core": "megatron", "pyyaml": "yaml"}
    return {other.get(r.name, r.name) for extra in extras for r in requirements()[extra]}


def not_in_a_plain_install() -> set[str]:
    """Modules of this environment that neither setup.py's first list nor its packages need."""
    core, todo = set(), list(requirements()[""])
    while todo:
        one = todo.pop()
        name = canonicalize_name(one.name)
        if name in core or (one.marker and not one.marker.evaluate({"extra": ""})):
            continue
        core.add(name)
        with suppress(metadata.PackageNotFoundError):
            todo += map(Requirement, metadata.requires(name) or ())
    return {
        module
        for module, owners in metadata.packages_distributions().items()
        if core.isdisjoint(map(canonicalize_name, owners))
    } - set(FOLDERS)


def test_setup_names_every_package_that_is_imported():
    named = modules("", "all") | {"pydantic_core"}  # comes with pydantic
    imported = {
        f.imported.split(".")[0]: str(f) for f in IMPORTS if not f.importer.startswith("benchmarks")
    }
    unnamed = imported.keys() - named - set(FOLDERS) - sys.stdlib_module_names
    assert [imported[name] for name in unnamed] == []
    assert modules("deepspeed", "hf", "megatron", "train") == modules("all") <= modules("dev")


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


def test_a_plain_install_has_the_optimizer_and_names_the_extras_of_the_rest():
    program = """
        import sys
        from importlib.machinery import PathFinder

        class Installed(PathFinder):
            @classmethod
            def find_spec(cls, name, path=None, target=None):
                if name.split(".")[0] not in MISSING:
                    return super().find_spec(name, path, target)

        sys.meta_path[sys.meta_path.index(PathFinder)] = Installed
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
        assert not loaded & MISSING, loaded

        def error(use, *arguments):
            try:
                use(*arguments)
            except ModuleNotFoundError as problem:
                return str(problem)

        exec("from coat_dist import *")
        found = [
            error(coat_dist.initialize, None, net),
            error(coat_dist.convert_to_universal, "here", "there"),
            error(coat_dist.patch_model, net, coat_dist.CoatConfig()),
            error(__import__, "megatron_patches"),
        ]
        assert found == [
            "coat_dist.initialize needs deepspeed: pip install 'coat-dist[deepspeed]'",
            "coat_dist.convert_to_universal needs deepspeed: pip install 'coat-dist[deepspeed]'",
            "coat_dist.patch_model needs transformers: pip install 'coat-dist[hf]'",
            "megatron_patches needs megatron: pip install 'coat-dist[megatron]'",
        ], found
        expected = f"launch needs {', '.join(TRAIN)}: pip install 'coat-dist[train]'"
        assert error(__import__, "launch") == expected
    """
    missing, train = not_in_a_plain_install() | {"triton"}, sorted(modules("train"))
    assert modules("all") <= missing and not missing & {"torch", "numpy", "pydantic", "packaging"}
    given = f"MISSING, TRAIN = {missing}, {train}\n"
    done = subprocess.run(
        [sys.executable, "-c", given + textwrap.dedent(program)],
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

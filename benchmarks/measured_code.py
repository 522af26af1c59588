"""Which code a result was measured with: a digest of each part of the library, so that what is outdated is known.

    python -m benchmarks.measured_code [CHECKOUT]

A part's digest covers the definitions (functions, classes, constants) that its entry files have or reach by name,
wherever they are. So a new kernel of the flow outdates what was measured of layers, and not of the optimizer, though
both use `kernels/fp8.py`. Comments, docstrings and imports do not count.

Names are followed through imports and modules' attributes. One step is made by name at run time, and known here: an
operation that `reference/norm.py` defines has its kernel under the same name in `kernels/norm.py`. The command prints
the digests of another commit's files, too: what was measured there before digests were written is current if they are
the same.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import io
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

__all__ = ["GRAPHS", "PARTS", "USUAL", "Code", "Digests", "digests", "main", "same_code", "without_words"]

ROOT = Path(__file__).resolve().parents[1]
Digests = dict[str, str]
GRAPHS = "graphs"
PARTS = {
    "optimizer": ("coat_dist/optim/adamw.py",),
    "flow": ("coat_dist/flow/*.py", "megatron_patches/patch.py", "megatron_patches/spec.py"),
    # Of the DeepSpeed side what works in every step; the rest refuses, looks up or runs when an engine is built.
    "deepspeed": tuple(
        f"coat_dist/deepspeed/{file}.py" for file in ("step*", "cached_weights", "fp8_gather", "pipeline")
    ),
    "training": (
        "coat_dist/optim/groups.py",
        *(f"coat_dist/deepspeed/{file}.py" for file in ("master_weights", "replicated_grads", "round_robin")),
        *(f"megatron_patches/{file}.py" for file in ("optimizer", "pipeline", "replicated_grads")),
    ),
    # Runs with `activation.cuda_graphs` alone: results without it do not depend on it.
    GRAPHS: ("coat_dist/flow/cuda_graphs.py", "coat_dist/flow/graph_pool.py", "megatron_patches/cuda_graphs.py"),
}
"""Entry files by name or pattern: what GPUs compute in an optimizer's step, in a layer, and beside them in DeepSpeed's
step; and what only whole training runs depend on: groups of parameters, hooks of gradients, schedules of stages."""
USUAL = tuple(part for part in PARTS if part != GRAPHS)
"""Of what every whole step depends on."""
PACKAGES = "coat_dist", "megatron_patches"
HERE = object()
"""The code that is here, where a result's digests could be given instead."""
NOT_COMPUTED = {
    "coat_dist.config_errors": "words of errors",
    "coat_dist.optim.group_keys": "refuses keys of a new group",
    "coat_dist.optim.state.check_group": "refuses options before a step",
    "coat_dist.optim.state_dict": "saves and loads",
    "coat_dist.ranks": "which rank this is",
    "megatron_patches.call_checks": "refuses arguments and models",
    # What is decided before anything runs, and told in the report. Benchmarks patch plain models of this project.
    "megatron_patches.grouped.why_bf16_grouped": "which experts stay BF16",
    "megatron_patches.hooks": "which blocks stay BF16 for what a program has set on their modules",
    "megatron_patches.linear.why_bf16_linear": "which linears stay BF16",
    "megatron_patches.linear.why_bf16_output_layer": "which output layers stay as they are",
    "megatron_patches.loss.why_plain_loss": "which losses stay plain",
    "megatron_patches.uncalled.check_whole": "refuses what was changed after patching",
}
"""Modules and definitions that are not followed, and why: a change of them changes no step."""
_CHECKS = ("coat_dist.optim.group_keys", "megatron_patches.call_checks")
"""Of these, what only raises: a line that is nothing but a call of it computes nothing either, and does not count."""
OPERATIONS = "coat_dist.reference.", "coat_dist.kernels."


class Module:
    """One file: its top-level names, where its imports lead, and its statements that have no name."""

    def __init__(self, name: str, file: Path, package: bool) -> None:
        source = file.read_text("utf-8")
        tree = ast.parse(source)
        self.lines = lines_without_words(source, tree)
        self.named: dict[str, list[ast.stmt]] = {}
        self.nameless: list[ast.stmt] = []
        self.imports: dict[str, tuple[str, str | None]] = {}
        self._home = (name if package else name.rpartition(".")[0]).split(".")
        for statement in tree.body:
            if names := list(bound(statement)):
                for one in names:
                    self.named.setdefault(one, []).append(statement)
            elif not isinstance(statement, (ast.Import, ast.ImportFrom)):
                self.nameless.append(statement)
            # Not those inside of definitions: another one's name may be the same.
            if not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                self.imports |= self.imported(ast.walk(statement))
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and self._checks(node.value.func):
                for row in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                    self.lines[row - 1] = ""

    def _checks(self, function: ast.expr) -> bool:
        return isinstance(function, ast.Name) and self.imports.get(function.id, ("",))[0] in _CHECKS

    def imported(self, nodes: Iterable[ast.AST]) -> dict[str, tuple[str, str | None]]:
        """What the import statements among ``nodes`` bind: a module, and a name in it or None."""
        found: dict[str, tuple[str, str | None]] = {}
        for node in nodes:
            if isinstance(node, ast.Import):
                found |= {one.asname or one.name: (one.name, None) for one in node.names}
            elif isinstance(node, ast.ImportFrom):
                base = self._home[: len(self._home) + 1 - node.level] if node.level else []
                module = ".".join([*base, *([node.module] if node.module else [])])
                found |= {one.asname or one.name: (module, one.name) for one in node.names}
        return found

    def text(self, statement: ast.stmt) -> str:
        """A statement with its decorators, without words."""
        first = min([statement.lineno, *(one.lineno for one in getattr(statement, "decorator_list", []))])
        return "\n".join(line for line in self.lines[first - 1 : statement.end_lineno] if line.strip())


class Code:
    """The library's modules below ``root``, and what of them is reached from where."""

    def __init__(self, root: Path = ROOT) -> None:
        self.modules: dict[str, Module] = {}
        self.files: dict[str, str] = {}
        for file in (file for package in PACKAGES for file in sorted((root / package).rglob("*.py"))):
            path = file.relative_to(root)
            parts = path.with_suffix("").parts
            package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if package else parts)
            self.modules[name] = Module(name, file, package)
            self.files[path.as_posix()] = name
        self.root = root

    def entries(self, part: str) -> list[str]:
        """A part's modules.

        Raises:
            ValueError: a pattern of PARTS finds none: a file was renamed, and changes to it would go unnoticed.
        """
        found = {one: sorted(self.root.glob(one)) for one in PARTS[part]}
        if empty := [one for one, files in found.items() if not files]:
            raise ValueError(f"PARTS: got {', '.join(empty)}, accepted: files of {self.root.name}")
        return [self.files[file.relative_to(self.root).as_posix()] for files in found.values() for file in files]

    def reached(self, entries: Iterable[str]) -> set[tuple[str, str]]:
        """(module, name) of all definitions that are used from modules, these ones whole; the name "" is a module's
        statements without one, which run when it is imported."""
        done: set[tuple[str, str]] = set()
        begin = {*entries}
        graphs = {self.files[file] for file in PARTS[GRAPHS] if file in self.files}
        apart = set() if begin == graphs else graphs
        todo = [one for module in begin for one in self._all(module)]
        while todo:
            module, name = todo.pop()
            if (module, name) in done or {module, f"{module}.{name}"} & NOT_COMPUTED.keys():
                continue
            if module in apart:
                continue
            done.add((module, name))
            todo += [(module, ""), *self._used(module, name)]
            if module.startswith(OPERATIONS[0]):
                todo += self._definition(module.replace(*OPERATIONS), name)
        return done

    def digest(self, part: str) -> str:
        digest = hashlib.sha256()
        for module, name in sorted(self.reached(self.entries(part))):
            for statement in self._statements(module, name):
                digest.update(f"{module}\0{name}\0{self.modules[module].text(statement)}\0".encode())
        return digest.hexdigest()[:12]

    def _all(self, module: str) -> Iterator[tuple[str, str]]:
        yield from ((module, name) for name in [*self.modules[module].named, ""] if name != "__all__")

    def _statements(self, module: str, name: str) -> list[ast.stmt]:
        here = self.modules[module]
        return here.named[name] if name else here.nameless

    def _used(self, module: str, name: str) -> Iterator[tuple[str, str]]:
        """Definitions of the library that a definition names."""
        here = self.modules[module]
        for statement in self._statements(module, name):
            nodes = list(ast.walk(statement))
            imports = here.imports | here.imported(nodes)
            through = set()  # modules of which one attribute is used
            for node in nodes:
                if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
                    continue
                if node.value.id in imports and (owner := self._module(*imports[node.value.id])) is not None:
                    through.add(node.value)
                    yield from self._definition(owner, node.attr)
            for node in nodes:
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node not in through:
                    if node.id in here.named:
                        yield module, node.id
                    elif node.id in imports:
                        yield from self._whole(*imports[node.id])

    def _module(self, module: str, name: str | None) -> str | None:
        """The module that an import binds, if it is one of the library's."""
        whole = f"{module}.{name}" if name else module
        if whole in self.modules:
            return whole
        if name and module in self.modules and name in self.modules[module].imports:
            return self._module(*self.modules[module].imports[name])
        return None

    def _whole(self, module: str, name: str | None) -> Iterator[tuple[str, str]]:
        """What an import binds: a definition, or all of a module."""
        if (bound_module := self._module(module, name)) is not None:
            yield from self._all(bound_module)
        elif name is not None:
            yield from self._definition(module, name)

    def _definition(self, module: str, name: str) -> Iterator[tuple[str, str]]:
        """Where a module's name is defined: there, or in what it imports."""
        if module not in self.modules:
            return
        here = self.modules[module]
        if name in here.named:
            yield module, name
        elif name in here.imports:
            yield from self._whole(*here.imports[name])
        elif f"{module}.{name}" in self.modules:
            yield from self._whole(module, name)


def bound(statement: ast.stmt) -> Iterator[str]:
    """The names that a top-level statement defines; imports aside."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield statement.name
    elif isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        yield from (node.id for one in targets for node in ast.walk(one) if isinstance(node, ast.Name))


@functools.cache
def digests(root: Path = ROOT) -> Digests:
    """Of each part, 12 hexadecimal digits: a result that was measured with others may not be what this code gives."""
    code = Code(root)
    return {part: code.digest(part) for part in PARTS}


def same_code(measured: object, parts: Sequence[str] = USUAL, other: object = HERE) -> bool:
    """Whether a result with the digests ``measured`` is of the code that is here, as to ``parts``; or of that of
    another result, which has the digests ``other``. A result without a digest of some part is not known to be."""
    wanted = digests() if other is HERE else other
    if not isinstance(measured, dict) or not isinstance(wanted, dict):
        return False
    return all(part in measured and measured[part] == wanted.get(part) for part in parts)


def without_words(source: str) -> str:
    """A program without its comments, docstrings and blank lines: what can be changed, and what was measured stays. The
    same in every version of Python, as tokens and syntax trees themselves are not."""
    return "\n".join(line for line in lines_without_words(source, ast.parse(source)) if line.strip())


def lines_without_words(source: str, tree: ast.Module) -> list[str]:
    """:func:`without_words`, with empty lines where words were."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for row in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                lines[row - 1] = ""
    return [line.rstrip() for line in lines]


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Digests of each part of the library.")
    parser.add_argument("checkout", nargs="?", type=Path, default=ROOT, help="folder (default: this one)")
    checkout = parser.parse_args(given).checkout
    if not all((checkout / package).is_dir() for package in PACKAGES):
        parser.error(f"checkout: got {str(checkout)!r}, accepted: a folder with {' and '.join(PACKAGES)}")
    code = Code(checkout)
    for part in PARTS:
        try:
            print(f"{part}: {code.digest(part)}")
        except ValueError as error:  # an earlier commit's files have other names
            print(error)


if __name__ == "__main__":
    main()

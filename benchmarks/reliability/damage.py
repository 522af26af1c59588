"""Files of a checkpoint that are not what was written."""

from __future__ import annotations

import functools
import random
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from .bench import Bench, Case, describe, short, some
from .ranks import Outcome

__all__ = ["cases"]


class Damage(NamedTuple):
    """What is done to a folder that holds A and B, of which ``latest`` names B."""

    name: str
    do: Callable[[Path], object]
    files: tuple[str, ...]
    """The error must name one of these."""
    may_load: tuple[str, ...] = ()
    """States that may be loaded instead of an error."""


def cases(bench: Bench, few: int | None) -> Iterator[Case]:
    """Loading must raise on every rank, name the file, and leave the engine as it was, to the bit."""
    left = _damages(bench.both)
    if few is not None:
        left = some(left, few)
    while left:
        # One engine meets them all as long as it stays what it was; after another the next one meets a new engine.
        folders = [bench.work / f"damaged-{number}" for number in range(len(left))]
        actions: list[list] = [["train", 1], ["digest"]]
        for damage, folder in zip(left, folders, strict=True):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(bench.both, folder)
            damage.do(folder)
            actions += [["load", str(folder)], ["digest"]]
        out = bench.run(actions, limit=90, timeout=10)
        for number in range(len(left)):
            what, passed, unchanged = _judge(bench, left[number], out, number)
            yield Case("damage", bench.stage, left[number].name, what, passed)
            if not unchanged:
                break
        left = left[number + 1 :]
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def _judge(bench: Bench, damage: Damage, out: Outcome, number: int) -> tuple[str, bool, bool]:
    """What load ``number`` of a run has led to: a text, whether that is right, whether the engine is what it was."""
    digests = [found[number + 1 : number + 2] for found in out.results("digest")]
    before = [found[0] for found in out.results("digest")]
    loads = [found[number] if len(found) > number else {} for found in out.results("load")]
    errors = [load.get("error") for load in loads]
    if not all(digests):
        return describe(out), False, False
    after = [found[0] for found in digests]
    if not any(errors):
        for name, state in bench.states.items():
            if after == state:
                return f"loads {name}, to the bit", name in damage.may_load, False
        return (
            ("loads nothing and says so in a warning only", False, True)
            if after == before
            else ("loads damaged bytes, without an error", False, False)
        )
    first = next(filter(None, errors))
    if not all(errors):
        return f"only rank {[bool(e) for e in errors].index(True)} fails: {short(first)}", False, False
    if after != before:
        return f"fails, and has changed the engine: {short(first)}", False, False
    unnamed = [r for r, e in enumerate(errors) if e and not any(name in e for name in damage.files)]
    if unnamed:
        return f"rank {unnamed[0]}'s error names no file: {short(errors[unnamed[0]])}", False, True
    return "every rank names the file; the engine is as it was", True, True


def _damages(both: Path) -> list[Damage]:
    tag = (both / "latest").read_text(encoding="utf-8").strip()
    earlier = next(
        p.name for p in sorted(both.iterdir()) if p.is_dir() and p.name != tag and not p.name.startswith(".")
    )
    names = sorted(p.name for p in (both / tag).glob("*.pt"))
    found = []
    for name in names:
        kinds: dict[str, Callable[[Path], object]] = {
            "missing": Path.unlink,
            "empty": lambda path: path.write_bytes(b""),
            "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
            "without its last byte": lambda path: path.write_bytes(path.read_bytes()[:-1]),
            "one bit of a tensor flipped": functools.partial(_flip, tensor=True),
            "one bit of the pickle flipped": functools.partial(_flip, tensor=False),
            "garbage": lambda path: path.write_bytes(random.Random(0).randbytes(path.stat().st_size)),
            "of another step": lambda path: shutil.copy(path.parents[1] / earlier / path.name, path),
        }
        for kind, do in kinds.items():
            found.append(Damage(f"{name}: {kind}", functools.partial(_on, do, tag, name), (name,)))
    for what in ("optim_states.pt", "model_states.pt"):
        ranks = [name for name in names if name.endswith(what)]
        if len({(both / tag / name).read_bytes() for name in ranks}) == 2:  # equal files may change places
            found.append(
                Damage(f"{what} of ranks 0 and 1: swapped", functools.partial(_swap, tag, ranks), tuple(ranks))
            )
    if (both / tag / "manifest.json").exists():
        listed = ("manifest.json",)
        found += [
            Damage("manifest.json: missing", lambda f: (f / tag / "manifest.json").unlink(), listed, ("B",)),
            Damage("manifest.json: empty", lambda f: (f / tag / "manifest.json").write_text(""), listed),
            Damage("manifest.json: garbage", lambda f: (f / tag / "manifest.json").write_bytes(b"\x80\xff{"), listed),
        ]
    contents = {"empty": b"", "wrong name": b"global_step99", "binary": b"\xff\xfe\x00\x80", "of A": earlier.encode()}
    for kind, content in contents.items():
        may = ("A",) if kind == "of A" else ()
        found.append(Damage(f"latest: {kind}", functools.partial(_latest, content), ("latest", "global_step99"), may))
    found.append(Damage("latest: missing", lambda f: (f / "latest").unlink(), ("latest",), ("A", "B")))
    return found


def _on(do: Callable[[Path], object], tag: str, name: str, folder: Path) -> None:
    do(folder / tag / name)


def _latest(content: bytes, folder: Path) -> None:
    (folder / "latest").write_bytes(content)


def _swap(tag: str, names: list[str], folder: Path) -> None:
    paths = [folder / tag / name for name in names]
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, reversed(contents), strict=True):
        path.write_bytes(content)


def _flip(path: Path, tensor: bool) -> None:
    """One bit in the middle of the largest tensor, or of the pickle that describes them."""
    with zipfile.ZipFile(path) as archive:
        entries = [e for e in archive.infolist() if ("/data/" in e.filename) == tensor]
        if not tensor:
            entries = [e for e in entries if e.filename.endswith("data.pkl")]
        entry = max(entries, key=lambda e: e.file_size, default=archive.infolist()[0])
    content = bytearray(path.read_bytes())
    header = entry.header_offset
    start = header + 30 + int.from_bytes(content[header + 26 : header + 28], "little")
    start += int.from_bytes(content[header + 28 : header + 30], "little")
    content[start + entry.file_size // 2] ^= 64
    path.write_bytes(content)

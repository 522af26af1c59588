"""FP8 codes in universal checkpoints: groups that a run finds again when it loads keep their bytes.

Decoding to fp32 and encoding again is not the identity: with range expansion a group's exponent
follows its extremes, and those have moved by their own rounding. So a universal checkpoint holds,
beside the fp32 moments, the codes of every group that lies within one parameter, in
``zero/<name>/codes.coat`` (2.05 bytes a parameter; DeepSpeed's loader would take a file that ends
in ``.pt`` for a tensor). Where a loading run has a group of exactly the same elements, stored in
the same way, it takes these bytes; all other groups are encoded from fp32.

Where all parameters of a group and all shards start on 128-element borders (hidden sizes that are
multiples of 128, mostly), every group is found again at any data-parallel size and ZeRO stage, but
only at the same tensor-parallel size.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...optim.state import CODE_KEYS, LAYOUT_KEYS

__all__ = ["CODES_FILE", "groups_within", "load_codes", "read", "read_codes", "select_codes"]
__all__ += ["write_codes"]

CODES_FILE = "codes.coat"


def groups_within(first: int, start: int, numel: int, size: int) -> tuple[slice, torch.Tensor]:
    """Groups of ``size`` elements that lie in one fragment, and where each begins in the parameter:
    int64 [groups].

    Args:
        first: the fragment's first element, in the flattened parameter.
        start: its first element, in the flat tensor that groups are counted in.
        numel: its elements.
    """
    low = -(-start // size)
    high = max(low, (start + numel) // size)
    return slice(low, high), torch.arange(low, high) * size + (first - start)


def select_codes(state: Mapping[str, Any], groups: slice) -> dict[str, torch.Tensor]:
    """Copies of these groups' codes, amax and exponents."""
    return {key: state[key][groups].clone() for key in CODE_KEYS}


def write_codes(
    path: Path, layout: Mapping[str, Any], ranks: list[list[tuple[torch.Tensor, dict]]]
) -> None:
    """Write one parameter's codes, and the storage options ``layout`` of its parameter group.

    ``ranks`` has for each tensor-parallel rank what its data-parallel ranks hold: where groups
    begin, and their codes.
    """
    joined = []
    for pieces in ranks:
        starts = torch.cat([starts for starts, _ in pieces])
        joined.append(
            {"starts": starts}
            | {key: torch.cat([codes[key] for _, codes in pieces]) for key in CODE_KEYS}
        )
    torch.save({"layout": {key: layout[key] for key in LAYOUT_KEYS}, "ranks": joined}, path)


def read_codes(
    path: Path,
    state: Mapping[str, Any],
    group: Mapping[str, Any],
    place: tuple[int, int, int],
    tp: tuple[int, int],
) -> int:
    """Put the saved codes of one fragment's groups into a state, where the file has them; how many
    it had.

    Args:
        path: the file of codes. If it was written with other storage options or by another number
            of tensor-parallel ranks, none of its codes can be used.
        state: with FP8 moments; changed in place.
        group: its parameter group.
        place: first, start and numel of the fragment, as in :func:`groups_within`.
        tp: tensor-parallel rank and size.
    """
    saved = load_codes(path)
    if (
        saved is None
        or len(saved["ranks"]) != tp[1]
        or any(saved["layout"][key] != group[key] for key in LAYOUT_KEYS)
    ):
        return 0
    codes = saved["ranks"][tp[0]]
    groups, starts = groups_within(*place, group["group_size"])
    if not len(starts) or not len(codes["starts"]):
        return 0
    # The saved starts ascend.
    at = torch.searchsorted(codes["starts"], starts).clamp(max=len(codes["starts"]) - 1)
    found = codes["starts"][at] == starts
    rows = (torch.arange(groups.start, groups.stop))[found]
    for key in CODE_KEYS:
        state[key][rows.to(state[key].device)] = codes[key][at[found]].to(state[key].device)
    return len(rows)


def load_codes(path: Path) -> dict[str, Any] | None:
    """What a file of codes holds; None where there is none."""
    return read(path, tensors_only=True) if path.is_file() else None


def read(path: Path, mmap: bool = True, tensors_only: bool = False) -> Any:
    """A file's content; tensors memory-mapped, where it was written as a zip file (torch's
    default). With ``tensors_only`` unpickling runs no code, as it may for DeepSpeed's files.

    Raises:
        ValueError: it cannot be read; names it.
    """
    try:
        return torch.load(
            path,
            map_location="cpu",
            weights_only=tensors_only,
            mmap=mmap and zipfile.is_zipfile(path),
        )
    # Of damaged bytes, or of classes that are not here, unpickling may raise anything.
    except Exception as problem:
        raise ValueError(
            f"{path}: cannot be read ({type(problem).__name__}: {problem})"
        ) from problem

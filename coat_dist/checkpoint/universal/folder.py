"""A universal checkpoint as one tensor-parallel rank sees it: what it holds, and this rank's
part of each tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .codes import CODES_FILE
from .zero_files import EXTRA_STATE, read


class UniversalFolder:
    """The folder of a universal checkpoint of :func:`convert_to_universal` or DeepSpeed's
    converter, memory-mapped.

    Args:
        folder: holds ``zero/``.
        tp: tensor-parallel rank and size.

    Attributes:
        rest: frozen parameters and buffers.
        complete: there is a ``rest``; DeepSpeed's converter keeps trained parameters only.
        extra: modules' extra states (``get_extra_state``), by name, one for each tensor-parallel
            rank. They are copies and not memory-mapped, since a module may keep what it is given.

    Raises:
        ValueError: a file that concerns no single parameter is missing or cannot be read.
    """

    def __init__(self, folder: Path, tp: tuple[int, int]) -> None:
        self.folder, self.tp = folder / "zero", tp
        self.globals = read(self.folder / "optimizer_state.pt")
        rest, extra = self.folder / "rest.pt", self.folder / EXTRA_STATE
        self.complete = rest.is_file()
        self.rest: dict[str, dict[str, Any]] = read(rest) if self.complete else {}
        self.extra: dict[str, list[Any]] = read(extra, mmap=False) if extra.is_file() else {}

    def trained(self) -> set[str]:
        """Names of the parameters that were trained."""
        return {path.name for path in self.folder.iterdir() if path.is_dir()}

    def has(self, name: str) -> bool:
        """Whether there are weights of this parameter, or this buffer, trained or not."""
        return name in self.rest or (self.folder / name / "fp32.pt").is_file()

    def part(self, name: str, shape: torch.Size, key: str = "fp32") -> torch.Tensor:
        """This rank's part of a tensor of a parameter, or of a buffer: fp32 where it was trained
        and in its own dtype otherwise; ``ValueError`` where it has another shape.
        """
        if name in self.rest:
            return self._divide(self.rest[name], shape, f"{self.folder / 'rest.pt'}: {name}")
        path = self.folder / name / f"{key}.pt"
        return self._divide(read(path), shape, str(path))

    def step(self, name: str) -> int:
        """Steps taken of a trained parameter."""
        return int(read(self.folder / name / "step.pt"))

    def codes(self, name: str) -> Path:
        """Where the parameter's FP8 codes are, if there are any."""
        return self.folder / name / CODES_FILE

    def extra_state(self, name: str) -> Any:
        """The extra state of a module on this rank.

        Raises:
            ValueError: another number of ranks saved it, and not all saved the same.
        """
        values = self.extra[name]
        if len(values) == self.tp[1]:
            return values[self.tp[0]]
        if not all(_same(value, values[0]) for value in values):
            raise ValueError(
                f"{self.folder / EXTRA_STATE}: {name}: got one for each of {len(values)} "
                f"tensor-parallel ranks, accepted with {self.tp[1]}: the same on all"
            )
        return values[0]

    def _divide(self, saved: Mapping[str, Any], shape: torch.Size, where: str) -> torch.Tensor:
        """This rank's part of a whole tensor. DeepSpeed's keys beside it say how to divide it."""
        rank, size = self.tp
        whole = local = saved["param"]
        # As DeepSpeed's converter writes what ZeRO-3 had.
        if whole.ndim == 1 and whole.numel() == shape.numel():
            local = whole.view(shape)
        if "cat_dim" in saved and size > 1:
            dim = saved["cat_dim"]
            divided = [
                piece.chunk(size, dim)
                for piece in whole.chunk(saved.get("param_n_sub_params", 1), dim)
            ]
            if all(len(pieces) == size for pieces in divided):
                mine = [pieces[rank] for pieces in divided]
                local = mine[0] if len(mine) == 1 else torch.cat(mine, dim)
        if local.shape != shape:
            raise ValueError(
                f"{where}: got shape {list(whole.shape)}, accepted: one that gives {list(shape)} "
                f"on tensor-parallel rank {rank} of {size}"
            )
        return local


def _same(one: Any, other: Any) -> bool:
    """Whether two extra states are known to be equal."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    try:
        return type(one) is type(other) and bool(one == other)
    except (RuntimeError, ValueError):  # tensors in a container
        return False

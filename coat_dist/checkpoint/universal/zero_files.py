"""The files that ZeRO's ``engine.save_checkpoint`` writes: which there are, and where a
parameter lies in them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...optim.master import read_master
from ...optim.moments import read_moment
from ...optim.state import CODE_KEYS, MOMENT_OF
from .codes import groups_within, read

KEYS = ("fp32", "exp_avg", "exp_avg_sq")
"""Tensors a parameter has in a universal checkpoint."""
EXTRA_STATE = "extra_state.pt"
"""Modules' extra states in a universal checkpoint."""
OPTIMIZER = r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt"
MODEL = r"(mp)_rank_(\d+)_model_states\.pt"
"""Model files of stages 1 and 2: "mp", and the tensor-parallel rank."""
MODEL3 = r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt"
"""Model files of stage 3: data- and tensor-parallel rank."""


class Place(NamedTuple):
    """Where one rank keeps its part of a parameter: in flat tensor ``flat``, from ``start``."""

    flat: int
    start: int
    numel: int


class Shard:
    """The optimizer file of one rank."""

    def __init__(
        self, path: Path, dp_rank: int, dp: int, param_shapes: list[Mapping[str, torch.Size]]
    ) -> None:
        self.path = path
        file = read(path)
        saved = self.saved = file["optimizer_state_dict"]
        zero = (file.get("ds_config") or {}).get("zero_optimization") or {}
        self.version = saved.get("ds_version") or file.get("ds_version")
        self.stage3 = "fp32_flat_groups" in saved
        self.round_robin = bool(zero.get("round_robin_gradients")) and not self.stage3
        base = saved["optimizer_state_dict"] if self.stage3 else saved["base_optimizer_state"]
        self.state, self.groups = base["state"], base["param_groups"]
        self.fp32 = saved["fp32_flat_groups" if self.stage3 else "single_partition_of_fp32_groups"]
        self.group_of = {i: group for group in self.groups for i in group["params"]}
        self.places: dict[str, Place] = {}
        self.names = [name for shapes in param_shapes for name in shapes]
        if not self.stage3:
            for i, mapping in enumerate(saved["param_slice_mappings"]):
                self.places.update(
                    {name: Place(i, at.start, at.numel) for name, at in mapping.items()}
                )
            return
        # Every parameter is divided by itself and padded at its end.
        for i, shapes in enumerate(param_shapes):
            start = 0
            for name, shape in shapes.items():
                part = -(-shape.numel() // dp)
                self.places[name] = Place(
                    i, start, max(0, min(part, shape.numel() - dp_rank * part))
                )
                start += part

    def rename(self, names: Mapping[str, str]) -> None:
        """Call parameters by other names."""
        self.places = {names.get(name, name): place for name, place in self.places.items()}
        self.names = [names.get(name, name) for name in self.names]

    def place(self, name: str) -> Place:
        """Where this rank's part of a parameter lies; ``numel`` is 0 if it has none."""
        return self.places.get(name, Place(0, 0, 0))

    def part(self, name: str, key: str) -> torch.Tensor:
        """This rank's part of a parameter or moment, flat, fp32."""
        i, start, numel = self.place(name)
        if not numel:
            return torch.empty(0)
        if key == "fp32":
            return read_master(
                self.fp32[i].detach().reshape(-1), self.state.get(i) or {}, start, numel
            )
        state = self._state(name)
        if key in state:
            return state[key].reshape(-1).narrow(0, start, numel).float()
        return read_moment(state, self.group_of[i], MOMENT_OF[key], start, numel)

    def weights(self, name: str) -> torch.Tensor:
        """This rank's part of a parameter as the file holds it, flat: fp32, or bfloat16 beside
        remainders.
        """
        i, start, numel = self.place(name)
        return self.fp32[i].detach().reshape(-1)[start : start + numel]

    def layout(self, name: str) -> Mapping[str, Any] | None:
        """Options of the group that a parameter with FP8 moments is in; None where this rank has
        nothing of it.
        """
        place = self.place(name)
        if not place.numel or "coat_m_q" not in self._state(name):
            return None
        return self.group_of[place.flat]

    def codes(self, name: str, first: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Groups of a parameter's part that begins at ``first``, with nothing else in them; and
        their codes.
        """
        i, start, numel = self.places[name]
        groups, starts = groups_within(first, start, numel, self.group_of[i]["group_size"])
        state = self._state(name)
        return starts, {key: state[key][groups] for key in CODE_KEYS}

    def step(self, name: str) -> int | None:
        """Steps taken; None where this rank has nothing of the parameter."""
        place = self.place(name)
        if not place.numel:
            return None
        self._state(name)
        return int(self.steps(place.flat))

    def steps(self, flat: int) -> Any:
        """Steps taken of a flat tensor; None where it has no state. Some optimizers count them
        by group.
        """
        group = self.group_of.get(flat) or {}
        return (self.state.get(flat) or {}).get("step", group.get("step"))

    def _state(self, name: str) -> Mapping[str, Any]:
        state = self.state.get(self.places[name].flat) or {}
        known = "coat_m_q" in state or {"exp_avg", "exp_avg_sq"} <= state.keys()
        if not known or self.steps(self.places[name].flat) is None:
            found = ", ".join(sorted(state)) or "nothing (saved before the first step)"
            raise ValueError(
                f"{self.path}: state of {name}: got {found}, accepted: that of CoatAdamW, or step, "
                "exp_avg and exp_avg_sq"
            )
        return state


def files_by_rank(folder: Path, pattern: str, required: bool = True) -> list[list[Path]]:
    """Files by [tensor-parallel rank][data-parallel rank]."""
    found = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if match := re.fullmatch(pattern, path.name):
            dp_rank, tp_rank = match.groups()
            found[int(tp_rank), 0 if dp_rank == "mp" else int(dp_rank)] = path
    if not found:
        if required:
            raise ValueError(
                f"{folder}: no file matches {pattern}, accepted: a checkpoint of ZeRO stage 1, 2 "
                "or 3"
            )
        return []
    rows: dict[int, list[Path]] = {}
    for tp_rank, dp_rank in sorted(found):
        rows.setdefault(tp_rank, []).append(found[tp_rank, dp_rank])
    return list(rows.values())

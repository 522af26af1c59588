"""Loading universal checkpoints into CoatAdamW or torch's AdamW, at any parallel sizes and ZeRO stage.

DeepSpeed's own loader leaves fp32 moments in the optimizer's state and links parameters to them, so that 8 bytes a
parameter stay alive; it fails where a rank has no part of a group, restores neither frozen parameters nor buffers, and
at stage 3 does not divide by tensor-parallel ranks. :func:`enable_universal_load` therefore puts :func:`load_universal`
in the place of the one method of the ZeRO optimizer that does this; everything around it stays DeepSpeed's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..ops.moments import encode
from .adamw import CoatAdamW
from .master import write_master
from .partitions import Partition, partitions
from .state import codecs, has_remainder, moment, new_state
from .universal_codes import FILE, read_codes
from .zero_files import KEYS

__all__ = ["enable_universal_load", "load_universal"]

_CHUNK = 1 << 24
"""Elements encoded at once: bounds the fp32 copy on the device to 64 MiB."""


def enable_universal_load(engine: Any) -> None:
    """Let ``engine.load_checkpoint`` with ``"checkpoint": {"load_universal": true}`` fill a CoatAdamW.

    Works for torch's Adam and AdamW too; engines with another optimizer, or without ZeRO, are left alone.
    ``coat_dist.initialize`` calls it for CoatAdamW.

    Raises:
        RuntimeError: this DeepSpeed has no such method.
    """
    zero = engine.optimizer
    if not isinstance(getattr(zero, "optimizer", None), CoatAdamW | torch.optim.Adam):  # AdamW is an Adam
        return
    if not hasattr(zero, "_load_universal_checkpoint"):
        raise RuntimeError(
            f"{type(zero).__name__}: has no _load_universal_checkpoint, accepted: DeepSpeed 0.19; universal "
            "checkpoints cannot be loaded"
        )

    def load(checkpoint_folder: str, load_optimizer_states: bool = True, load_from_fp32_weights: bool = False) -> None:
        load_universal(engine, checkpoint_folder, moments=load_optimizer_states)

    zero._load_universal_checkpoint = load


@torch.no_grad()
def load_universal(engine: Any, folder: str | Path, moments: bool = True) -> None:
    """Fill fp32 weights, moments, frozen parameters and buffers from a universal checkpoint.

    Moments are encoded to nearest, for all groups, before this returns; groups whose codes the checkpoint holds get
    these bytes (``optim/universal_codes.py``). Hyperparameters stay the present ones: each
    group keeps its own. The caller has the 16-bit weights renewed at stages 1 and 2, as DeepSpeed does.

    Args:
        engine: DeepSpeed engine with a CoatAdamW or torch's AdamW under ZeRO-1, 2, 3 or BF16_Optimizer.
        folder: holds ``zero/``.
        moments: false loads weights only.

    Raises:
        ValueError: files are missing or of another model; names them. Nothing has been changed then.
    """
    zero, folder = engine.optimizer, Path(folder) / "zero"
    names = engine.param_names
    parts = list(partitions(zero))
    keys = KEYS if moments else KEYS[:1]
    needed = [names[f.param] for part in parts for f in part.fragments]
    files = [f"{name}/{key}.pt" for name in needed for key in (*keys, *(["step"] if moments else []))]
    missing = [f for f in ("optimizer_state.pt", *files) if not (folder / f).is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(
            f"{folder}: missing {', '.join(missing[:3])}{more}, accepted: a universal checkpoint of this model, "
            "as launch/to_universal.py writes it"
        )
    tp = _tensor_parallel(engine)
    for part in parts:  # shapes first, so that a foreign checkpoint changes nothing
        for fragment in part.fragments:
            for key in keys:
                _local(folder / names[fragment.param] / f"{key}.pt", fragment.shape, *tp)
    steps = set()
    for part in parts:
        weights = _gather(part, folder, names, "fp32", tp)
        if moments:
            step = {int(torch.load(folder / names[f.param] / "step.pt", weights_only=True)) for f in part.fragments}
            steps |= step
            _fill_state(zero.optimizer, part, folder, names, tp, step.pop() if step else None)
        _fill_weights(zero.optimizer, part, weights)
    if moments:
        # A rank that holds nothing of a group still steps it: its count has to agree for bias correction to be one.
        for part in parts:
            if not part.fragments:
                zero.optimizer.state[part.flat]["step"] += max(steps, default=0)
        _relink(parts, zero.optimizer)
    _load_loss_scale(zero, folder)
    _renew_stage3(zero)
    _load_rest(engine, folder, tp)


def _fill_state(base: Any, part: Partition, folder: Path, names: Mapping, tp: tuple[int, int], step: int | None):
    """Replace the state of one partition."""
    if not isinstance(base, CoatAdamW):
        moments = {key: _gather(part, folder, names, key, tp).to(part.flat.device) for key in KEYS[1:]}
        on_device = part.group.get("fused") or part.group.get("capturable")
        count = torch.tensor(float(step or 0), device=part.flat.device if on_device else "cpu")
        base.state[part.flat] = {"step": count, **moments}
        return
    state = new_state(part.flat, part.group)
    state["step"] = step or 0
    for key, which, codec in zip(KEYS[1:], "mv", codecs(part.group), strict=True):
        values = _gather(part, folder, names, key, tp)
        if part.group["moments"] == "fp32":
            state[key].copy_(values)
            continue
        stored = moment(state, which)
        size = max(_CHUNK // codec.group_size, 1)
        for first in range(0, codec.groups(values.numel()), size):
            chunk = values[first * codec.group_size : (first + size) * codec.group_size].to(part.flat.device)
            type(stored)(*(t[first : first + size] for t in stored)).copy_(encode(chunk, codec))
    if part.group["moments"] == "fp8":
        for f in part.fragments:
            read_codes(folder / names[f.param] / FILE, state, part.group, (f.first, f.start, f.numel), tp)
    old = base.state.get(part.flat) or {}
    state |= {k: old[k] for k in ("coat_seed",) if k in old}
    base.state[part.flat] = state


def _fill_weights(base: Any, part: Partition, weights: torch.Tensor) -> None:
    """Replace the master weights of one partition; a remainder is part of the state, which may not exist yet."""
    state = base.state.get(part.flat) or {}
    if "step" not in state and has_remainder(part.group):
        base.state[part.flat] = state = new_state(part.flat, part.group)
    write_master(part.flat, state, 0, weights)


def _gather(part: Partition, folder: Path, names: Mapping, key: str, tp: tuple[int, int]) -> torch.Tensor:
    """This rank's partition of the weights or a moment, flat, fp32, on the CPU; padding is zero."""
    flat = torch.zeros(part.flat.numel())
    for f in part.fragments:
        values = _local(folder / names[f.param] / f"{key}.pt", f.shape, *tp)
        flat[f.start : f.start + f.numel] = values.reshape(-1)[f.first : f.first + f.numel]
    return flat


def _local(path: Path, shape: torch.Size, tp_rank: int, tp: int) -> torch.Tensor:
    """A tensor's part of one tensor-parallel rank; memory-mapped where it is contiguous in the file."""
    try:
        entry = torch.load(path, map_location="cpu", weights_only=False, mmap=True)
    except (OSError, RuntimeError, EOFError) as problem:
        raise ValueError(f"{path}: cannot be read ({problem})") from problem
    whole = entry["param"]
    if "sub_param_shape" in entry:
        raise ValueError(f"{path}: holds sub_param_shape, accepted: param, cat_dim, param_n_sub_params, vocab_tensor")
    if "cat_dim" not in entry or tp == 1 and whole.numel() == shape.numel():
        local = whole.view(shape) if whole.numel() == shape.numel() else whole
    else:
        dim = entry["cat_dim"]
        if entry.get("vocab_tensor") and whole.shape[0] < shape[0] * tp:  # padded as this run pads
            whole = torch.cat([whole, whole.new_zeros(shape[0] * tp - whole.shape[0], *whole.shape[1:])])
        pieces = whole.chunk(entry.get("param_n_sub_params", 1), dim)
        divided = [piece.chunk(tp, dim) for piece in pieces]
        even = all(len(d) == tp for d in divided)
        local = torch.cat([d[tp_rank] for d in divided], dim) if even and len(divided) > 1 else whole
        local = divided[0][tp_rank] if even and len(divided) == 1 else local
    if local.shape != shape:
        raise ValueError(
            f"{path}: got shape {list(whole.shape)}, accepted: one that gives {list(shape)} on tensor-parallel rank "
            f"{tp_rank} of {tp}"
            + ("" if "cat_dim" in entry else "; how to divide it was not recorded when it was converted")
        )
    return local


def _relink(parts: list[Partition], base: Any) -> None:
    """Point DeepSpeed's accessors at the new state (at stages 1 and 2), so that the old one is freed."""
    for part in parts:
        for f in part.fragments:
            mapping = getattr(f.param, "_hp_mapping", None)
            if mapping is not None:
                mapping.set_optim_state_fragment(part.flat, base.state[part.flat])


def _renew_stage3(zero: Any) -> None:
    """16-bit partitions from the fp32 ones, as DeepSpeed's own stage-3 loading does."""
    for i, flat in enumerate(getattr(zero, "fp32_partitioned_groups_flat", ())):
        half = zero.fp16_partitioned_groups_flat[i]
        if flat.numel():
            half.data.copy_(flat.data)
        params = zero.fp16_partitioned_groups[i]
        for param, renewed in zip(params, zero.unflatten(half, params), strict=True):
            param.data = renewed.data


def _load_loss_scale(zero: Any, folder: Path) -> None:
    """The loss scale, where saved and present run scale in the same way (fp16 by fp16, not fp16 by bf16)."""
    saved = torch.load(folder / "optimizer_state.pt", map_location="cpu", weights_only=False)
    for key in ("loss_scaler", "dynamic_loss_scale"):
        if key in saved and type(saved[key]) is type(getattr(zero, key, None)):
            setattr(zero, key, saved[key])


def _load_rest(engine: Any, folder: Path, tp: tuple[int, int]) -> None:
    """Frozen parameters and buffers."""
    path = folder / "rest.pt"
    if not path.is_file():  # written by DeepSpeed's converter
        return
    rest = torch.load(path, map_location="cpu", weights_only=True)
    found: dict[str, Any] = {n: p for n, p in engine.module.named_parameters() if not p.requires_grad}
    found |= dict(engine.module.named_buffers())
    for name, entry in rest.items():
        if name not in found:
            raise ValueError(f"{path}: got {name}, accepted: frozen parameters and buffers of this model")
        target = found[name]
        whole, shape = entry["param"], getattr(target, "ds_shape", target.shape)
        if "cat_dim" in entry and tp[1] > 1:
            whole = whole.chunk(tp[1], entry["cat_dim"])[tp[0]]
        if whole.shape != shape:
            raise ValueError(f"{path}: {name}: got shape {list(whole.shape)}, accepted: {list(shape)}")
        if hasattr(target, "ds_tensor"):  # ZeRO-3
            part = target.ds_tensor.ds_numel
            first = part * torch.distributed.get_rank(target.ds_process_group)
            mine = whole.reshape(-1)[first : first + part]
            target.ds_tensor.data.view(-1)[: mine.numel()].copy_(mine)
        else:
            target.data.copy_(whole)


def _tensor_parallel(engine: Any) -> tuple[int, int]:
    """(rank, size)."""
    mpu = engine.mpu
    for kind in ("tensor_model_parallel", "model_parallel"):
        if hasattr(mpu, f"get_{kind}_world_size"):
            return getattr(mpu, f"get_{kind}_rank")(), getattr(mpu, f"get_{kind}_world_size")()
    return 0, 1

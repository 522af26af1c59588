"""What patching did, as an object that prints as a table."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from dataclasses import dataclass, field

from torch import nn

from ..config import ActivationConfig, CoatConfigError


@dataclass
class PatchReport:
    """What :func:`patch_model` did. ``str()`` is a table; names are those of
    ``model.named_modules()``.
    """

    settings: ActivationConfig
    """What the model was patched with."""
    blocks: dict[str, str | None] = field(default_factory=dict)
    """All blocks: None for one that runs the flow, or why it stays in BF16."""
    unfused: dict[str, str] = field(default_factory=dict)
    """Passes that stay Megatron's or autograd's in patched blocks, and why: rotary embedding
    (``self_attention``), the sum of a norm's and the residual's gradient (``self_attn_bda``,
    ``mlp_bda``), norms after their blocks.
    """
    fp8_share: float = 0.0
    """Of all weights that are matrices in the model's layers, those of experts included, the part
    that is multiplied in FP8: 0 to 1.
    """
    loss: dict[str, str] = field(default_factory=dict)
    """Output layers of language models: "chunked", "kept", or "plain" and why."""
    notes: list[str] = field(default_factory=list)
    """Settings of the model that patching overrides, and what else is not as one may expect."""
    _changed: bool = field(default=False, repr=False, compare=False)
    """Whether a block was left to its own code since it was patched."""

    @property
    def patched(self) -> list[str]:
        """Blocks that run the flow."""
        return [name for name, why in self.blocks.items() if why is None]

    @property
    def left(self) -> dict[str, str]:
        """Blocks that stay BF16, and why."""
        return {name: why for name, why in self.blocks.items() if why is not None}

    def note(self, text: str) -> None:
        """Add to the notes, once."""
        if text not in self.notes:
            self.notes.append(text)

    def warn(self, text: str) -> None:
        """Add to the notes, and warn, once."""
        if text not in self.notes:
            self.note(text)
            warnings.warn(f"coat_dist: {text}", stacklevel=2)

    def settle(self, block: str, why: str | None) -> None:
        """A block that was fused runs its own code from now on, for a reason, or with None is fused
        again.
        """
        if why is None:
            self.unfused.pop(block, None)
            return
        if block not in self.unfused and not self._changed:
            self._changed = True
            self.warn(
                f"{block} was patched, and runs its own code now: {why}; all ranks have to do the "
                "same (the report lists all blocks)"
            )
        self.unfused[block] = why

    @staticmethod
    def summary(reports: list[PatchReport]) -> str:
        """One line: how many blocks run the flow, and how many of a kind stay BF16 for which
        reasons.
        """
        left = Counter(
            f"{name.rpartition('.')[2]}, {why}" for r in reports for name, why in r.left.items()
        )
        patched = sum(len(r.patched) for r in reports)
        kinds = "; ".join(f"{count} x {kind}" for kind, count in left.items())
        said = f"FP8 flow in {patched} of {patched + left.total()} blocks"
        return f"{said} (left in BF16: {kinds})" if left else said

    def __str__(self) -> str:
        count, share = len(self.patched), f"{self.fp8_share:.1%} of the layers' weights"
        lines = [f"FP8 flow: {count} of {count + len(self.left)} blocks patched, {share}"]
        lines += [f"  patched  {names}" for names in condensed(self.patched)]
        for word, reasons in (("left   ", self.left), ("unfused", self.unfused)):
            by_reason: dict[str, list[str]] = {}
            for name, reason in reasons.items():
                by_reason.setdefault(reason, []).append(name)
            for reason, group in by_reason.items():
                lines += [f"  {word}  {names}: {reason}" for names in condensed(group)]
        lines += [f"  loss     {name}: {how}" for name, how in self.loss.items()]
        return "\n".join(lines + [f"  note     {note}" for note in self.notes])


def reports_of(model: nn.Module) -> list[PatchReport]:
    """The reports of what is patched in ``model``: none where nothing is, several where parts
    were one by one.
    """
    return [vars(m)["coat_patch_report"] for m in model.modules() if "coat_patch_report" in vars(m)]


def is_patched(model: nn.Module) -> bool:
    """Whether ``model`` is patched: it has a report, be it of nothing, or is a part of what has
    one.
    """
    return any(
        "coat_patch_report" in vars(m) or getattr(type(m), "coat_patched", False)
        for m in model.modules()
    )


def check_unpatched(model: nn.Module) -> None:
    """Raises CoatConfigError where ``model``, or a part of it, is patched."""
    if is_patched(model):
        raise CoatConfigError(
            "model: got one that is patched already, accepted: one that is not (unpatch_model "
            "first)"
        )


def check_settings(model: nn.Module, block: ActivationConfig) -> None:
    """Raises CoatConfigError where ``model``, or a part of it, was patched with other settings
    than ``block``.
    """
    for report in reports_of(model):
        changed = []
        for key, asked in block:
            had = getattr(report.settings, key)
            if had != asked:
                changed.append(f"{key} {had!r} where the block says {asked!r}")
        if changed:
            raise CoatConfigError(
                f"coat.activation: got a model that is patched already with {', '.join(changed)}; "
                "accepted: the same settings, or an unpatched model"
            )


def condensed(names: list[str]) -> list[str]:
    """``a.0.b, a.1.b, a.2.b`` → ``a.[0-2].b``; names without a number come first."""
    lines = []
    groups: dict[tuple[str, str], list[int]] = {}
    for name in names:
        match = re.fullmatch(r"(.*?\.)(\d+)(\..*)", name)
        if match:
            groups.setdefault((match[1], match[3]), []).append(int(match[2]))
        else:
            lines.append(name)
    for (before, after), numbers in groups.items():
        runs: list[list[int]] = []
        for n in sorted(numbers):
            if runs and n == runs[-1][1] + 1:
                runs[-1][1] = n
            else:
                runs.append([n, n])
        span = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
        lines.append(f"{before}[{span}]{after}")
    return lines

"""Hooks and ``forward`` of a program's own, on modules whose calls a patch changes: they keep a
block in BF16.

Such a hook would not run, or see other values. ``module.forward = ...``, as activation
checkpointing, accelerate and adapters set it, holds the method of the class before, and would run
in place of the patched one, or not at all.
"""

from __future__ import annotations

from typing import Any

__all__ = ["CALL", "INPUT", "INPUT_OR_ITS_GRADIENT", "OUTPUT", "why_bf16_hooks", "why_own_forward"]

# The tables of torch.nn.Module that hold hooks, by what their hooks see.
INPUT = ("_forward_pre_hooks",)
OUTPUT = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
CALL = INPUT + OUTPUT
INPUT_OR_ITS_GRADIENT = ("_forward_pre_hooks", "_backward_hooks")

_HANDLED = ("megatron.core.distributed.", "deepspeed.")
"""Packages whose hooks gather parameters; patched modules take care of these themselves (see
``NormMLP``).
"""


def why_bf16_hooks(layer: Any, changed: dict[str, tuple[str, ...]]) -> str | None:
    """The first hook of a program in the tables that a patch ``changed``, by the path of a
    module in ``layer``.
    """
    for path, tables in changed.items():
        module = layer.get_submodule(path)
        if (reason := why_own_forward(path, module)) is not None:
            return reason
        for table in tables:
            for hook in getattr(module, table).values():
                if not str(getattr(hook, "__module__", "")).startswith(_HANDLED):
                    kind = table.strip("_").removesuffix("s").replace("_", " ")
                    return f"{path} has a {kind}, which would not run or see other values"
    return None


def why_own_forward(name: str, module: Any) -> str | None:
    """That a program has set ``forward`` on a module itself, or None; ``name`` is the module's
    in the reason.
    """
    return (
        f"{name} has a forward of its own, which a patch would pass by"
        if "forward" in vars(module)
        else None
    )

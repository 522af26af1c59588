"""After ``import coat_dist``, ``deepspeed.initialize`` honours the ``"coat"`` block, whoever calls
it.

DeepSpeed's function object is kept and given other code, so that names bound to it earlier go the
same way. A copy with DeepSpeed's code is its ``__wrapped__``; signature and docstring stay
DeepSpeed's. The function is changed when DeepSpeed is imported, or at once where it has been.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from typing import Any

import torch

from ..optim import CoatAdamW
from .without_launcher import leave_out_compiled_operation

KEPT = "initialize_without_coat"
"""The attribute of the module ``deepspeed`` that is its own function: other libraries may
replace ``initialize``.
"""


def install() -> None:
    """Honour the block in ``deepspeed.initialize``, now or once it is imported."""
    torch.optim.CoatAdamW = CoatAdamW  # type: ignore[attr-defined]  # where DeepSpeed looks a type up
    sys.meta_path.insert(0, _AfterImport())  # also where it is loaded: it may be reloaded
    if (module := sys.modules.get("deepspeed")) is not None:
        honour(module)


def honour(deepspeed: types.ModuleType) -> None:
    """Lead calls of ``deepspeed.initialize`` through :func:`_called`; a second time nothing is
    changed.
    """
    given: Any = getattr(deepspeed, "initialize", None)
    # A folder of that name that is no DeepSpeed; a second time.
    if not callable(given) or hasattr(deepspeed, KEPT):
        return
    if hasattr(deepspeed, "ops"):
        from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

        # Now: programs such as Accelerate call init_distributed before initialize.
        leave_out_compiled_operation()
        # Programs that name CoatAdamW in their JSON, or make it themselves, need no
        # "zero_allow_untested_optimizer".
        ZERO_SUPPORTED_OPTIMIZERS.append(CoatAdamW)
    function = inspect.unwrap(given)
    # Put there by another library.
    if not isinstance(function, types.FunctionType) or function.__closure__:
        wrapper = functools.wraps(given)(lambda *args, **kwargs: _called(*args, **kwargs))
        vars(deepspeed).update({"initialize": wrapper, KEPT: given})
        return
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(copy, function)
    del copy.__wrapped__  # type: ignore[attr-defined]
    function.__wrapped__ = copy  # type: ignore[attr-defined]
    function.__signature__ = inspect.signature(copy)  # type: ignore[attr-defined]
    function.__code__ = _called.__code__
    setattr(deepspeed, KEPT, copy)


def _called(*args: Any, **kwargs: Any) -> Any:
    # The code of `deepspeed.initialize`, which runs among the names of that module: it has to
    # import its own.
    from coat_dist.deepspeed.engine import called_as_deepspeed

    return called_as_deepspeed(args, kwargs)


class _AfterImport:
    """A finder that finds DeepSpeed where others do, and calls :func:`honour` once it is
    imported.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "deepspeed":
            return None
        found = (
            f.find_spec(name, path, target)
            for f in sys.meta_path
            if not isinstance(f, _AfterImport)
        )
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_honour(module: types.ModuleType) -> None:
                vars(module).pop(KEPT, None)  # reloaded: it gets a new function
                execute(module)
                honour(module)

            spec.loader.exec_module = execute_and_honour  # type: ignore[method-assign]
        return spec

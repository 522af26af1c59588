"""AdamW with moments in 8 bits: 2.05 bytes a parameter instead of 8."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ..ops import AdamWStep, AdamWTensors, FP32Tensors, adamw_fp32_steps, adamw_steps
from .checks import Pairs, check_capture, check_step
from .group_keys import check_keys
from .host import on_host, stream_steps, to_home, wait
from .moments import forget_written
from .plan import Plans
from .seeds import name_of, new_seed, noise_seed, taken_seeds
from .sharded import is_dtensor, local, local_grad
from .state import check_group, codecs, ensure_state, moment, stochastic
from .state import remainder as low_half
from .state_dict import FP32States, check_and_box, gather, unbox


class CoatAdamW(torch.optim.Optimizer):
    """AdamW (decoupled weight decay, bias correction) with FP8 moments; see
    ``reference/moments.py`` for the encoding.

    Takes float32, bfloat16 and float16 parameters and dense gradients of these types; computes in
    fp32. It knows nothing of DeepSpeed's sharding: what ZeRO hands it, a flat fp32 slice, is a
    parameter like any other. Of a DTensor (FSDP2) each rank updates its shard.

    **Master weights.** By default the parameter is the master weight: fp32 under ZeRO, and what a
    16-bit parameter cannot hold of an update is lost. With ``master_weights="bf16_remainder"`` a
    bfloat16 parameter is the upper half of an fp32 master weight whose lower half is part of the
    state: training goes as with an fp32 parameter, bit for bit (given the same gradients), in 4
    bytes for master weight and bfloat16 weight together. The parameter is the master weight rounded
    to nearest, half-way cases away from zero (``reference/master.py``). A parameter that is written
    between steps stays what was written: its old remainder moves the master weight by at most half
    a bfloat16 step. :func:`coat_dist.optim.set_master` writes both halves.

    Every argument but ``checkpoint`` is also a key of parameter groups, where it overrides the
    default given here. A group has one key more: ``"moments": "fp8"`` (default) or ``"fp32"``, for
    small tensors; :func:`coat_dist.optim.param_groups` sets it.

    Args:
        params: parameters, (name, parameter) pairs or parameter groups.
        lr: learning rate, a number or a tensor of one element.
        betas: decay rates of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay.
        maximize: ascend instead of descend.
        first_moment, second_moment: "e4m3" or "e5m2"; the first also "int8", the second "log8".
        expand: dynamic range expansion. False is refused with "log8".
        normalize: store the first moment divided by the root of the second. False stores it by
            itself, as COAT does.
        group_size: elements that share one amax and exponent: 64, 128 or 256.
        stochastic_rounding: round codes stochastically instead of to nearest: those of both moments
            (True), of none (False), or those that would drift otherwise ("auto"): the second
            moment, and the first in int8. Rounding to nearest drops changes smaller than half a
            code step (docs/numerics.md). The noise is a function of the parameter's name, the step
            and the element: a parameter draws the same alone and among others, whenever it is
            added, and in one step no two draw the same. Names are those of (name, parameter) pairs
            or of :func:`coat_dist.optim.param_groups`. Without names noise goes by the order in
            which parameters took their first steps, as nothing else distinguishes identically
            shaped parameters after a restart (``optim/seeds.py``). Runs are reproducible and resume
            exactly with and without names.
        master_weights: "parameter" or "bf16_remainder".
        state_device: "parameter", or "cpu": codes and remainders of parameters on a GPU stay in
            pinned host memory, from where each step moves them past the GPU (docs/memory.md). Equal
            bits; fp32 moments stay on the GPU.
        capturable: count steps on the device, so that :meth:`step` can be captured in a CUDA graph
            and replayed: the same bits as without. Needs parameters on a CUDA GPU. In a graph a
            learning rate that is a number stays what it was; a tensor on the GPU is read in every
            replay.
        checkpoint: what :meth:`state_dict` gives and :meth:`load_state_dict` takes: "codes", the
            state to the byte, or "fp32", moments and master weights in fp32, which ``state`` shows,
            too. Torch's AdamW loads these, and they load with other formats and on any sharding. It
            is an attribute that may be changed.

    Raises:
        ValueError, TypeError: names the option, what was given and what is accepted.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        maximize: bool = False,
        first_moment: str = "e4m3",
        second_moment: str = "e4m3",
        expand: bool = True,
        normalize: bool = True,
        group_size: int = 128,
        stochastic_rounding: bool | str = "auto",
        master_weights: str = "parameter",
        state_device: str = "parameter",
        capturable: bool = False,
        checkpoint: str = "codes",
    ) -> None:
        if checkpoint not in ("codes", "fp32"):
            raise ValueError(
                f"CoatAdamW checkpoint: got {checkpoint!r}, accepted: 'codes' or 'fp32'"
            )
        self.checkpoint = checkpoint
        super().__init__(
            params,
            dict(
                lr=lr,
                betas=betas,
                eps=eps,
                weight_decay=weight_decay,
                maximize=maximize,
                moments="fp8",
                first_moment=first_moment,
                second_moment=second_moment,
                expand=expand,
                normalize=normalize,
                group_size=group_size,
                stochastic_rounding=stochastic_rounding,
                master_weights=master_weights,
                state_device=state_device,
                capturable=capturable,
            ),
        )

    grad_factor: torch.Tensor | None = None
    """fp32 scalar on the gradients' device that every gradient is multiplied by before use, in the
    same pass; None = 1. For code that unscales and clips: a gradient norm gives the factor, and no
    gradient is written back.
    """

    copies: Mapping[torch.Tensor, torch.Tensor] = MappingProxyType({})
    """Contiguous bfloat16 or float16 tensors of as many elements, by parameter: each receives the
    new value of its parameter, rounded to nearest even, in the same pass. Not for DTensors.
    """

    _shared = False
    """Somebody may hold a state dict whose tensors are states in host memory, and read it
    without waiting.
    """

    @property
    def coded_state(self) -> dict[Any, Any]:
        """States by parameter as they are kept; those in host memory are complete when this
        returns.
        """
        # Of a wrapper with this class, as Fabric's, which then asks what it wraps.
        if "state" not in self.__dict__:
            raise AttributeError("state")
        wait()
        return self.__dict__["state"]

    @property
    def state(self) -> Any:
        """States by parameter; with ``checkpoint="fp32"`` as state dicts hold them, in new
        tensors.
        """
        return FP32States(self) if self.checkpoint == "fp32" else self.coded_state

    @state.setter
    def state(self, value: dict[Any, Any]) -> None:
        self.__dict__["state"] = value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; options it does not give take their defaults."""
        if isinstance(param_group, dict) and "params" in param_group:
            # Torch refuses a set: its order is not fixed.
            if not isinstance(param_group["params"], torch.Tensor | set):
                param_group = {**param_group, "params": list(param_group["params"])}
            check_keys(param_group, self.defaults)
            check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update all parameters that have a gradient. Returns what ``closure`` (run first, with
        gradients) returns.

        Raises:
            TypeError: a gradient is sparse, complex or float64; a parameter with a remainder is not
                bfloat16.
            ValueError: sizes, devices or layouts of a parameter, its gradient, state or copy do not
                fit one another, as after a parameter was enlarged through ``.data``. Each names the
                parameter's group and index; no parameter and no state has been changed then.
            RuntimeError: a CUDA graph is being captured, and a group is not ``capturable``.
        """
        # Under torch.compile a step is what it is without, to the bit: outside graphs.
        if torch.compiler.is_compiling():
            return self._step_outside_graphs(closure)
        return self._step(closure)

    @torch._disable_dynamo
    def _step_outside_graphs(self, closure: Callable[[], Any] | None) -> Any:
        return self._step(closure)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        check_capture(self.param_groups)
        forget_written()
        states = self.__dict__["state"]  # without waiting
        plans: Plans = self.__dict__.setdefault("_plans", Plans())
        found, unknown = [], []
        for i, group in enumerate(self.param_groups):
            one = plans.find(i, group, states, self.copies, self.grad_factor)
            found.append(one)
            unknown.append([] if one.batches else list(zip(one.params, one.grads, strict=True)))
            for p, _ in unknown[-1]:
                to_home(states.get(p) or {}, p, group)
        check_step(self.param_groups, states, unknown, self.copies, self.grad_factor)
        for group, pairs, one in zip(self.param_groups, unknown, found, strict=True):
            if one.batches:
                for step, device, batch in one.batches:
                    self._run(group, step, device, batch)
            elif pairs:
                self._step_group(group, pairs)
                plans.learn(one, group, states, self.copies, self.grad_factor)
        if self._shared:
            wait()
        return loss

    def _run(
        self, group: Mapping[str, Any], step: int, device: torch.device, together: Sequence[Any]
    ) -> None:
        """Update parameters of one device and one number of steps."""
        numbers = _numbers(group, step, device, self.grad_factor)
        if group["moments"] == "fp8":
            adamw_steps(together, *codecs(group), numbers)
        else:
            adamw_fp32_steps(together, numbers)

    def _step_group(self, group: Mapping[str, Any], pairs: Pairs) -> None:
        """Step those parameters of a group, all checked before, for which there is no plan.

        First each parameter in turn, in the group's order:

        * Its state is made if this is its first step. Only then is a seed chosen, in this order, so
          that parameters without names draw the same noise in every run.
        * Its step is counted, before the update: bias correction counts from one.
        * Of a DTensor the shard is stepped, which is a plain tensor.
        * Whatever is not contiguous is copied, because codes are in the order of the shape's
          elements, whatever their order in memory. With FP8 moments such a parameter, and one whose
          state is in host memory, is stepped at once: otherwise copies of all of them would be held
          together. All others wait.

        Then those that waited, in as few launches as possible. A launch has one step number and one
        device, and parameters of a group may differ in both: each had its first gradient at some
        time. Where the step is counted on the device, one launch takes all of a device.

        Last, autograd learns that shards have changed: it saves the DTensor, whose counter is not
        that of the tensor in it.
        """
        states = self.__dict__["state"]
        capturable = bool(group.get("capturable"))
        noisy = any(stochastic(group))
        waiting: dict[tuple[int, torch.device], list[Any]] = {}
        shards: list[torch.Tensor] = []
        self._seed_states(group, pairs)
        for p, grad in pairs:
            state = states[p]
            state["step"] += 1
            count = state["step"] if capturable else None
            key = (1 if capturable else state["step"]), p.device
            copy, streamed = self.copies.get(p), on_host(p, group)
            if is_dtensor(p):
                shards.append(p)
                grad, p = local_grad(p, grad), local(p)
            low = low_half(state, p.numel())
            if group["moments"] != "fp8":
                m, v = local(state["exp_avg"]), local(state["exp_avg_sq"])
                waiting.setdefault(key, []).append(FP32Tensors(p, grad, m, v, low, copy, count))
                continue
            seed = noise_seed(state["coat_seed"]) if noisy else None
            dense, g = p.contiguous(), grad.contiguous()
            one = AdamWTensors(
                dense, g, moment(state, "first"), moment(state, "second"), seed, low, copy, count
            )
            if dense is p and g is grad and not streamed:
                waiting.setdefault(key, []).append(one)
                continue
            run = stream_steps if streamed else adamw_steps
            run([one], *codecs(group), _numbers(group, *key, self.grad_factor))
            if dense is not p:
                p.copy_(dense)
        for key, together in waiting.items():
            self._run(group, *key, together)
        increment_version(shards)

    def _seed_states(self, group: Mapping[str, Any], pairs: Pairs) -> None:
        """Make states that are not there, each with a seed.

        A state has its seed from the first step on, even while "auto" rounds to nearest: keys of a
        state must not depend on the betas.
        """
        states = self.__dict__["state"]
        seeded = group["moments"] == "fp8" and group["stochastic_rounding"] is not False
        taken: set[int] | None = None
        places: dict[torch.Tensor, int] = {}
        for p, _ in pairs:
            state = ensure_state(states, p, group)
            if seeded and "coat_seed" not in state:
                if taken is None:
                    taken = taken_seeds(states)
                    places = {p: i for i, p in enumerate(group["params"])}
                state["coat_seed"] = new_seed(name_of(group, places[p]), taken)

    def state_dict(self) -> dict[str, Any]:
        """The state to the byte; of DTensor parameters as DTensors, which
        ``torch.distributed.checkpoint`` can save.

        With ``checkpoint="fp32"`` it holds fp32 moments instead. It shares memory with states, as
        torch's do: a step changes tensors of a state dict that is held over it.
        """
        handle = self.register_state_dict_post_hook(gather, prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state to the byte, on the device of each parameter or where ``state_device``
        says.

        As with every torch optimizer, the options saved in parameter groups replace the present
        ones; those that are lacking stay, and so does ``state_device``. Those that say how moments
        are stored have to agree, except with ``checkpoint="fp32"``, and what codes mean (formats,
        ``expand``) must be there.

        Raises:
            ValueError: saved by another optimizer, with other storage options, with options that
                are not accepted, or from parameters of another shape or sharding. Nothing has been
                changed then.
        """
        handle = self.register_load_state_dict_pre_hook(check_and_box)  # the last to run
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        mine = {"state": self.coded_state, "checkpoint": self.checkpoint}
        return {**super().__getstate__(), **mine}

    def __setstate__(self, state: dict[str, Any]) -> None:
        unbox(state)
        forget_written()
        super().__setstate__(state)
        self.__dict__.pop("_plans", None)


def _numbers(
    group: Mapping[str, Any], step: int, device: torch.device, grad_factor: torch.Tensor | None
) -> AdamWStep:
    """The numbers of a step; a learning rate that lives on the parameters' GPU stays there."""
    lr = group["lr"]
    if isinstance(lr, torch.Tensor):
        lr = lr.reshape(()) if lr.is_cuda and lr.device == device else float(lr)
    else:
        lr = float(lr)  # a kernel takes Python's floats, and a schedule may have made it numpy's
    if grad_factor is not None:
        # Of one element: its shape must not become the update's.
        grad_factor = grad_factor.reshape(())
    beta1, beta2 = group["betas"]
    return AdamWStep(
        lr,
        float(beta1),
        float(beta2),
        float(group["eps"]),
        float(group["weight_decay"]),
        step,
        group["maximize"],
        grad_factor,
        stochastic(group),
    )

"""A DeepSpeed configuration and its ``"coat"`` block, read once.

The first function that is handed a configuration makes a :class:`Settings` of it, and every later
one accepts that: ``coat_dist.initialize`` and ``deepspeed.initialize``, ``patch_model``,
``zero_init``, the functions of ``megatron_patches``, the programs in ``launch``. Reading parses the
file and the block and drops comments. :meth:`Settings.check` compares the values with the
table in :mod:`coat_dist.refused`. What the caller gave is never changed: DeepSpeed gets a
copy (:meth:`Settings.for_deepspeed`).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .config import CoatConfig, CoatConfigError, load_json, without_comments
from .config_errors import Problem, got
from .known_keys import OF_ADAM, defaults_of_coat_adamw, misspelt, unknown
from .optim import CoatAdamW
from .optim.state import check_group
from .refused import OFFLOAD, PARALLEL, ROWS, TYPES, ZERO, refused

_UNSET = ("bf16", "bfloat16", "aio")
"""Keys that may be null, which means to DeepSpeed that they are not given."""
_DROP_AUTO = (ZERO, "fp16", "bf16", "tensor_parallel", "compile")
"""Blocks in which DeepSpeed ignores what is "auto"."""


@dataclass(frozen=True)
class Settings:
    """One configuration. Make it with :meth:`read`."""

    config: Mapping[str, Any]
    """DeepSpeed's keys as the user wrote them, without comments and without the block."""
    coat: CoatConfig | None
    """The parsed block; None where there is none, or a wrong one."""
    problems: tuple[Problem | str, ...]
    """What is wrong with the block or its name."""
    source: Any
    """What was read."""
    entries: tuple[tuple[str, str, Any], ...]
    """Every key of DeepSpeed's at every level: what stands before it ("optimizer.", "" at the
    top), the key, the value. As DeepSpeed reads them: without null and "auto" where these mean
    that nothing is given, and "bfloat16", which DeepSpeed ignores beside "bf16", as "bf16".
    """
    values: Mapping[str, Any]
    """Values by dotted key, those of the block included."""

    @classmethod
    def read(cls, source: Any) -> Settings:
        """Read a path, a dict or base64 of JSON. A wrong block is reported by :meth:`block` and
        :meth:`check`.

        Raises:
            CoatConfigError: the configuration cannot be read.
        """
        if isinstance(source, Settings):
            return source
        given = load_json(source)  # a copy: a dict may change after it was read
        coat: CoatConfig | None = None
        problems: tuple[Problem | str, ...] = ()
        try:
            coat = CoatConfig.from_deepspeed(given)
        except CoatConfigError as error:
            problems = error.problems
        own = without_comments({key: value for key, value in given.items() if key != "coat"})
        return cls._made(own, coat, problems, source)._with_remainders()

    @classmethod
    def _made(
        cls, config: Mapping[str, Any], coat: CoatConfig | None, problems: Any, source: Any
    ) -> Settings:
        entries = tuple(_entries("", _as_deepspeed_reads(config)))
        values = {f"{owner}{key}": value for owner, key, value in entries}
        for name, block in () if coat is None else coat:
            values |= {f"coat.{name}.{key}": value for key, value in block}
        return cls(config, coat, problems, source, entries, values)

    def changed(self, **blocks: Any) -> Settings:
        """The same with other top-level keys of DeepSpeed."""
        return self._made({**self.config, **blocks}, self.coat, self.problems, self.source)

    def _with_remainders(self) -> Settings:
        """Add 16-bit remainders where the configuration offloads states and does not mention master
        weights: fp32 master weights cannot be in host memory.
        """
        value, coat = self.values.get, self.coat
        keys = ("bf16_master_weights_and_grads", "bf16_optimizer_states")
        said = [value(f"bf16.{key}") for key in keys] + [value("optimizer.params.master_weights")]
        if coat is not None and "master_weights" in coat.optimizer.model_fields_set:
            said.append(coat.optimizer.master_weights)
        offloads = value(f"{OFFLOAD}.device") == "cpu" and value("bf16.enabled")
        params = value("optimizer.params") or {}
        if (
            not offloads
            or value("optimizer.type") != "CoatAdamW"
            or not isinstance(params, Mapping)
            or any(one is not None for one in said)
        ):
            return self
        bf16 = {**self.values["bf16"], **dict.fromkeys(keys, True)}
        params = {**params, "master_weights": "bf16_remainder"}
        return self.changed(bf16=bf16, optimizer={**self.config["optimizer"], "params": params})

    @property
    def asked(self) -> bool:
        """Whether there is a block, be it a wrong one, or CoatAdamW's name."""
        named = self.values.get("optimizer.type") == "CoatAdamW"
        return named or self.coat is not None or bool(self.problems)

    def block(self, name: str = "config") -> CoatConfig:
        """The parsed block; CoatConfigError where it is wrong, or where ``name`` has none."""
        _raise(self.problems)
        if self.coat is None:
            accepted = "a DeepSpeed configuration with it"
            raise CoatConfigError(f'{name}: got one without a "coat" block, accepted: {accepted}')
        return self.coat

    def check(self, **context: Any) -> Facts:
        """Refuse what CoatAdamW, the flow or Megatron's parallelism cannot honour.

        Without a block and without a CoatAdamW it looks for misspelt names only, and checks the
        rows of pipeline stages and divided experts where there are some. ``context``: the
        arguments of :class:`Facts`.

        Raises:
            CoatConfigError: one line a key, with its value and what is accepted. Misspelt keys and
                wrong types are reported first, together with all that is wrong with the block.
        """
        facts = Facts(self, **context)
        found: list[Problem | str] = [*self.problems, *misspelt(self.entries)]
        if facts.ours:
            found += refused(TYPES, facts)
            found += unknown(self.entries, facts.named and facts.given is None)
        _raise(found)
        found = [*_parallel_problems(facts)]
        if facts.ours:
            found += [*refused(ROWS, facts), *_against_given(facts)]
        if facts.by_name:
            found += _wrong_params(self.values.get("optimizer.params") or {}, facts)
        if facts.ours and facts.stage and facts.cp > 1:
            accepted = "1 with ZeRO (gradients are not reduced over CP ranks)"
            found.append(Problem("context_parallel_size", got(facts.cp), accepted))
        _raise(found)
        return facts

    def check_parallel(self, stages: int = 1, ep: int = 1) -> None:
        """The part of :meth:`check` that concerns pipeline stages and divided experts."""
        _raise(_parallel_problems(Facts(self, stages=stages, ep=ep)))

    def for_deepspeed(self, facts: Facts | None = None) -> dict[str, Any]:
        """A copy for DeepSpeed's engine."""
        made = copy.deepcopy(dict(self.config))
        if facts is None:
            return made
        if facts.compressed:
            made["zero_allow_untested_optimizer"] = True  # "not one of DeepSpeed's own"
        if facts.hosted:  # CoatAdamW keeps its states there itself: DeepSpeed would step on the CPU
            made[ZERO]["offload_optimizer"]["device"] = "none"
        # As a reference model: an engine of stage 0 with bf16 would step while it is built.
        if facts.only_evaluates:
            made.pop("optimizer", None)
            made.pop("scheduler", None)
        return made


class Facts:
    """What the rows of the table ask about a configuration and the call that it is for.

    Args:
        optimizer: an object that is given to ``deepspeed.initialize``, or what a callable has made.
        tp, cp, stages, ep: sizes of Megatron's tensor, context, pipeline and expert parallelism.
        pipeline: the model is a ``deepspeed.pipe.PipelineModule``.
        frozen: no parameter of the model requires a gradient.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        optimizer: Any = None,
        tp: int = 1,
        cp: int = 1,
        stages: int = 1,
        ep: int = 1,
        pipeline: bool = False,
        frozen: bool = False,
    ) -> None:
        value, coat = settings.values.get, settings.coat
        self.values, self.coat, self.optimizer = settings.values, coat, optimizer
        self.tp, self.cp, self.stages, self.ep = tp, cp, stages, ep
        self.staged, self.divided = stages > 1, ep > 1
        self.given = optimizer if isinstance(optimizer, CoatAdamW) else None
        """The CoatAdamW that is given."""
        self.exports = getattr(self.given, "checkpoint", "codes") != "codes"
        self.named = value("optimizer.type") == "CoatAdamW"
        self.compressed = self.named or self.given is not None
        self.ours = settings.asked or self.given is not None
        self.block = coat is not None and "optimizer" in coat.model_fields_set
        """The block has options of the optimizer."""
        self.flow = coat is not None and bool(coat.activation.enabled)
        self.stage = value(f"{ZERO}.stage") or 0
        self.stage3, self.tensor_parallel = self.stage == 3, tp > 1
        self.flow3 = self.flow and self.stage3
        on = [name for name in ("bf16", "fp16") if value(f"{name}.enabled")]
        self.half = on[0] if on else None
        """The block that turns 16-bit training on."""
        self.hosted = self.compressed and value(f"{OFFLOAD}.device") == "cpu"
        """States are kept in host memory."""
        masters = value("optimizer.params.master_weights")
        if self.given is not None:  # groups that differ: deepspeed/step/master_weights.py
            masters = self.given.param_groups[0]["master_weights"]
        elif coat is not None:
            masters = masters or coat.optimizer.master_weights
        self.remainder = self.compressed and masters == "bf16_remainder"
        """Master weights are bfloat16 weights and remainders."""
        self.fp32_masters = self.compressed and not self.remainder
        at_stage_0 = self.compressed and self.stage == 0
        self.only_evaluates = at_stage_0 and optimizer is None and (frozen or self.half is not None)
        """The engine is built without the CoatAdamW that the configuration names."""
        self.trains_at_0 = (
            at_stage_0 and self.half is not None and (self.given is not None or pipeline)
        )
        self.foreign_type = self.block and self.given is None
        self.by_name = self.named and optimizer is None
        self.baseline_tp3 = self.stage3 and self.tensor_parallel and not self.compressed
        self.schedules = bool(value("scheduler.params"))


def _as_deepspeed_reads(config: Mapping[str, Any]) -> dict[str, Any]:
    """The top level without keys that are null, with "bfloat16" as "bf16"."""
    read = {key: v for key, v in config.items() if v is not None or key not in _UNSET}
    old = read.pop("bfloat16", None)
    if old is not None:
        read.setdefault("bf16", old)
    return read


def _entries(owner: str, block: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """The keys of ``block`` and of all blocks in it, as in ``Settings.entries``."""
    drops_auto = owner.startswith(_DROP_AUTO)
    for key, value in block.items():
        if not (drops_auto and value == "auto"):
            yield owner, str(key), value
            if isinstance(value, Mapping):
                yield from _entries(f"{owner}{key}.", value)


def _raise(found: Iterable[Problem | str]) -> None:
    """Raise the first problem of each key, if there are any."""
    first: dict[str, Problem | str] = {}
    for one in found:
        first.setdefault(getattr(one, "key", str(one)), one)
    if first:
        raise CoatConfigError(*first.values())


def _parallel_problems(facts: Facts) -> list[Problem]:
    """What pipeline stages and divided experts cannot be trained with."""
    found = [*refused(PARALLEL, facts)]
    if facts.staged and facts.divided:
        accepted = "1 with expert parallelism"
        found.append(Problem("mpu", f"got {facts.stages} pipeline stages", accepted))
    return found


def _against_given(facts: Facts) -> Iterator[Problem]:
    """Options that the block names and the given CoatAdamW does not have."""
    if facts.coat is None or facts.given is None or not facts.block:
        return
    for name in facts.coat.optimizer.model_fields_set:
        value = getattr(facts.coat.optimizer, name)
        others = [group[name] for group in facts.given.param_groups if group[name] != value]
        if others:
            text = f"{got(value)} beside a CoatAdamW that has {json.dumps(others[0])}"
            yield Problem(f"coat.optimizer.{name}", text, "its options, or none")


def _wrong_params(given: Mapping[str, Any], facts: Facts) -> list[Problem]:
    """What is wrong in ``optimizer.params``: options in two places, or else the first wrong
    value.
    """
    own = facts.coat.optimizer.model_dump(exclude_unset=True) if facts.coat is not None else {}
    params = {name: value for name, value in given.items() if name not in OF_ADAM}
    key = "optimizer.params."
    if twice := params.keys() & own.keys():
        text = "given beside coat.optimizer"
        return [Problem(f"{key}{name}", text, "one of the two") for name in sorted(twice)]
    options = {**defaults_of_coat_adamw(), **own, **params}
    try:
        check_group({**options, "moments": "fp8", "params": []}, key)
    except ValueError as error:
        problem: Problem = error.args[0]
        return [problem._replace(got=got(params.get(problem.key.removeprefix(key))))]
    return []

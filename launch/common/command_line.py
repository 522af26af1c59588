"""Command lines of the programs: options from the fields of a dataclass; errors are one line,
from one rank.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import inspect
import math
import os
import re
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from types import NoneType
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin, get_type_hints

LARGEST = 10**12
"""Upper bound of integer options."""


def _rank() -> int:
    task = os.environ.get("SLURM_PROCID", "0")  # of srun, until RANK is set from it
    return int(os.environ.get("RANK", task))


class DefaultsHelp(argparse.ArgumentDefaultsHelpFormatter):
    """Help with each default once, and none where there is none."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        shown = "(default: " in (action.help or "") or action.default in (None, False, [])
        return action.help if shown else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` without abbreviations, whose errors are one line and status 2.

    Under a launcher rank 0 alone prints them.

    Args:
        prefix: what errors begin with, before "error: ".
    """

    def __init__(self, *, prefix: str = "", **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)
        self.prefix = prefix
        # Its own pattern knows no exponents and lists: `--lr -1e-4` would lack a value.
        self._negative_number_matcher = re.compile(r"-(?:\.?\d|inf|nan)", re.IGNORECASE)

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        """Refuse unknown options before anything else: a misspelt one is also one that is
        missing.
        """
        for text in sys.argv[1:] if args is None else args:
            name = text.partition("=")[0]
            if name.startswith("--") and name not in self._option_string_actions:
                near = difflib.get_close_matches(name, self._option_string_actions, n=1)
                hint = f", accepted: what {self.prog} --help lists"
                if near:
                    hint = f" (did you mean {near[0]}?)"
                self.error(f"{name}: no such option{hint}")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with status 2."""
        if rank := _rank():
            # Rank 0 prints the same, and then the launcher ends this rank before it repeats it.
            time.sleep(10)
        line = f"{self.prefix}error: {' '.join(message.removeprefix('argument ').split())}"
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            # Late: it imports torch, which is not needed without torchrun.
            from coat_dist.ranks import tell_torchrun

            tell_torchrun(line)
        print(f"rank {rank}: {line}" if rank else line, file=sys.stderr, flush=True)
        sys.exit(2)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse values that are not among the choices, with the same message on every version
        of Python.
        """
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(
                action, f"got {value!r}, accepted: {', '.join(map(str, action.choices))}"
            )

    def print_help(self, file: Any = None) -> None:
        """Print the options, on rank 0."""
        if _rank() == 0:
            super().print_help(file)


def whole_number(text: str) -> int:
    """A whole number, as a type of an option."""
    if re.fullmatch(r"[-+]?[0-9]{1,20}", text) is None or abs(int(text)) >= LARGEST:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, accepted: a whole number in digits, below {LARGEST:.0e}"
        )
    return int(text)


def number(text: str) -> float:
    """A finite number, as a type of an option."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"got {text!r}, accepted: a number, such as 3e-4")
    return value


def local_path(text: str) -> str:
    """A path, as a type of an option; ``~`` is a home folder also behind "=", where shells leave
    it as it is.
    """
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"got {text!r}, accepted: a path")
    return os.path.expanduser(text)


def micro_batch(text: str) -> int | str:
    """A positive whole number, or "auto", as a type of an option."""
    if text == "auto":
        return text
    if text.isdecimal() and 1 <= (count := int(text)) < LARGEST:
        return count
    raise argparse.ArgumentTypeError(
        f"got {text!r}, accepted: a whole number from 1, below {LARGEST:.0e}, or auto"
    )


def memory_size(text: str) -> int:
    """Bytes of "80GiB", "80GB", "80g" (10^9) or "85899345920", as a type of an option."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?b?", text.strip().lower())
    if found is None or not float(found[1]):
        raise argparse.ArgumentTypeError(f"got {text!r}, accepted: a size such as 80GiB or 141GB")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** " kmgt".index(found[2] or " "))


LocalPath = Annotated[str, local_path]
MemorySize = Annotated[int, memory_size]
_TYPES = {int: whole_number, float: number, str: str}
_LEAST = {int: "an integer", float: "a number"}


def option(
    default: Any = MISSING,
    *,
    group: str = "",
    flags: Sequence[str] = (),
    least: float | None = None,
    **more: Any,
) -> Any:
    """A field that is an option: ``tensor_parallel`` is ``--tensor-parallel``. Its docstring is the
    help.

    The annotation says how it is parsed: ``bool`` is a flag, ``Literal`` has choices, ``list``
    takes several values, and ``Annotated[str, function]`` is converted by the function. An option
    without a default is required.

    Args:
        group: heading in the help.
        flags: names in place of the field's.
        least: smallest value that :func:`out_of_range` accepts.
        more: of ``add_argument``.
    """
    given = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    known = {"group": group, "flags": flags, "least": least, "more": more}
    return field(**given, kw_only=True, metadata={"option": known})  # type: ignore[call-overload]


def _options(cls: type) -> list[Any]:
    return [one for one in fields(cls) if "option" in one.metadata]


def _flags(one: Any) -> Sequence[str]:
    return one.metadata["option"]["flags"] or (f"--{one.name.replace('_', '-')}",)


def _docstrings(cls: type) -> dict[str, str]:
    """Docstrings of a dataclass's fields and of those of its bases, by the fields' names."""
    found: dict[str, str] = {}
    for one in reversed(cls.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(one))).body[0].body  # type: ignore[attr-defined]
        for statement, text in zip(body, body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(text, ast.Expr):
                found[statement.target.id] = " ".join(ast.literal_eval(text.value).split())  # type: ignore
    return found


def add_options(parser: argparse.ArgumentParser, cls: type) -> None:
    """Add the fields of a dataclass to a parser, under their headings."""
    hints, help_of = get_type_hints(cls, include_extras=True), _docstrings(cls)
    groups = {group.title: group for group in parser._action_groups}
    for one in _options(cls):
        known, kind = one.metadata["option"], hints[one.name]
        default = one.default_factory() if one.default_factory is not MISSING else one.default
        given = {**_of_type(kind), "default": default}
        if default is MISSING:
            given |= {"required": True, "default": None}
        target: Any = parser
        if title := known["group"]:
            target = groups[title] = groups.get(title) or parser.add_argument_group(title)
        given |= {"help": help_of[one.name], **known["more"]}
        target.add_argument(*_flags(one), dest=one.name, **given)


def _of_type(kind: Any) -> dict[str, Any]:
    """Arguments of ``add_argument`` for a value of this annotation."""
    if kind is bool:
        return {"action": "store_true"}
    parts = [part for part in get_args(kind) if part is not NoneType]
    if get_origin(kind) is Literal:
        return {"choices": parts}
    if get_origin(kind) is Annotated:
        return {"type": parts[1]}
    if get_origin(kind) is list:
        return {"nargs": "+", **_of_type(parts[0])}
    return {"type": _TYPES[kind]} if kind in _TYPES else _of_type(parts[0])


def options_parser(cls: type, prog: str) -> Parser:
    """The parser of a dataclass of options, whose docstring describes the program."""
    parser = Parser(prog=prog, description=inspect.getdoc(cls), formatter_class=DefaultsHelp)
    add_options(parser, cls)
    return parser


def out_of_range(options: Any) -> list[str]:
    """A line for each option that is below its least value."""
    lines = []
    for one in _options(type(options)):
        least, value = one.metadata["option"]["least"], getattr(options, one.name)
        if least is not None and value is not None and value < least:
            kind = _LEAST[type(least)]
            lines.append(f"{_flags(one)[0]}: got {value}, accepted: {kind} >= {least:g}")
    return lines


_model, _memory = partial(option, group="model"), partial(option, group="memory")


@dataclass(kw_only=True)
class RunOptions:
    """Options of programs that train, plan or measure: how ranks share a model, and what it
    takes of their memory.
    """

    tensor_parallel: int = _model(1, metavar="N", least=1)
    """ranks that share every layer"""
    expert_parallel: int = _model(1, metavar="N", least=1)
    """data-parallel ranks that divide the experts of every layer among themselves"""
    sequence_parallel: bool = _model(False)
    """also share the tokens between layers"""
    pipeline_parallel: int = _model(1, metavar="P", least=1)
    """stages that the layers are divided over"""
    virtual_stages: int = _model(1, metavar="V", least=1)
    """parts of the model in each stage (interleaved schedule): a smaller bubble, more
    communication
    """
    micro_batch: Annotated[int | str, micro_batch] | None = _memory(None, metavar="N|auto")
    """samples of a forward pass on a rank, in place of train_micro_batch_size_per_gpu; auto = the
    largest that fits, by the planner
    """
    recompute_granularity: Literal["full", "selective"] | None = _memory(None)
    """compute whole layers again in backward, or parts of them (default: keep what backward
    needs)
    """
    recompute_method: Literal["uniform", "block"] | None = _memory(None)
    """with full: units of so many layers, or only the first so many layers (default: uniform)"""
    recompute_num_layers: int | None = _memory(None, metavar="N", least=1)
    """with full: how many (default: 1)"""
    recompute_modules: list[Literal["core_attn", "mlp", "layernorm"]] | None = _memory(None)
    """with selective: which parts of a layer (default: core_attn)"""
    gpus: int | None = _memory(None, metavar="N", least=1)
    """number of GPUs, all of one kind"""
    gpu: str | None = _memory(None, metavar="NAME")
    """kind of GPU, such as h100 or h200 (default: the one here, else h100)"""
    gpu_memory: MemorySize | None = _memory(None, metavar="SIZE")
    """memory of a GPU, such as 80GiB (default: that of --gpu)"""
    other_memory: MemorySize | None = _memory(None, metavar="SIZE")
    """of it, what is not torch's: CUDA, NCCL, other programs (default: 2.2GiB, or 3.2GiB with
    several GPUs, and what other programs use of the GPU here)
    """


@dataclass(kw_only=True)
class ConfiguredOptions(RunOptions):
    """Options of programs that plan or measure."""

    model_override: list[str] = _model([], metavar="KEY=VALUE", action="extend")
    """replace values of the description"""
    vocab_size: int | None = _model(None, metavar="N", least=1)
    """where the model names none"""
    accumulation: int | None = option(None, metavar="N", least=1)
    """forward passes of a step, in place of the configuration's"""
    log_level: Literal["debug", "info", "warning", "error"] = option("info")
    """how much the program and libraries print"""


def check_recompute(args: Any) -> list[str]:
    """A line for every option of recomputation that would be ignored beside the others."""
    needed = {
        "recompute_method": "full",
        "recompute_num_layers": "full",
        "recompute_modules": "selective",
    }
    lines = []
    for name, granularity in needed.items():
        given = getattr(args, name)
        if given is not None and args.recompute_granularity != granularity:
            lines.append(
                f"--{name.replace('_', '-')}: got {given!r}, accepted: only with "
                f"--recompute-granularity {granularity}"
            )
    return lines

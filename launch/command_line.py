"""Command lines of the programs: what is typed wrong is one line, from one rank, with what was meant most likely."""

from __future__ import annotations

import argparse
import difflib
import math
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

__all__ = [
    "LARGEST",
    "DefaultsHelp",
    "Parser",
    "add_parallel_options",
    "add_pipeline_options",
    "local_path",
    "number",
    "one_stage_only",
    "whole_number",
]

_ARGUMENT = re.compile(r"argument ([^:]+): (.*)", re.DOTALL)
_SEVERAL = re.compile(r"expected (\d+) arguments")
_CHOICE = re.compile(r"invalid choice: (.*) \(choose from (.*)\)", re.DOTALL)
_REQUIRED = "the following arguments are required: "
_NEGATIVE = re.compile(r"-(?:\.?\d|inf|nan)", re.IGNORECASE)
LARGEST = 10**12
"""Below which whole numbers of options are."""


class DefaultsHelp(argparse.ArgumentDefaultsHelpFormatter):
    """Help that says the defaults which there are, once."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        said = "(default: " in (action.help or "") or action.default in (None, False, [])
        return action.help if said else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` without abbreviations, whose errors are one line and status 2.

    Under a launcher rank 0 alone speaks: errors and help would come from every rank.

    Args:
        prefix: what errors begin with, before "error: ".
        meant: names that other programs have for an option, without dashes: ``{"learning-rate": "--lr"}``.
        kwargs: of ``ArgumentParser``.
    """

    def __init__(self, *, prefix: str = "", meant: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)
        self.prefix, self.meant = prefix, dict(meant or {})
        # Its own pattern knows no exponents and lists: `--lr -1e-4` would lack a value.
        self._negative_number_matcher = _NEGATIVE

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        """Refuse what is no option before anything else: a misspelt one is also one that is missing."""
        given = list(sys.argv[1:] if args is None else args)
        unknown = [text.partition("=")[0] for text in self._before_dashes(given) if not self._known(text)]
        if unknown:
            self.error("; ".join(f"{one}: no such option{self._suggestion(one)}" for one in dict.fromkeys(unknown)))
        parsed, rest = super().parse_known_args(given, namespace)
        if rest:
            self.error(f"{rest[0]!r} belongs to no option")
        return parsed, rest

    def error(self, message: str) -> NoReturn:
        """Print one line and leave with status 2."""
        rank = _rank()
        if rank:
            time.sleep(10)  # rank 0 says the same, and then the launcher ends this rank before it repeats it
        line = " ".join(self._in_our_words(message).split("\n"))
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            from coat_dist.ranks import tell_torchrun  # late: it brings torch, for which nobody waits without torchrun

            tell_torchrun(f"{self.prefix}error: {line}")
        who = ""
        if rank:
            from coat_dist import nodes

            who = f"rank {rank}{f' (host {nodes.host()})' if nodes.several_nodes() else ''}: "
        print(f"{who}{self.prefix}error: {line}", file=sys.stderr, flush=True)
        sys.exit(2)

    def print_help(self, file: Any = None) -> None:
        """Print what the options are, on rank 0."""
        if _rank() == 0:
            super().print_help(file)

    @staticmethod
    def _before_dashes(given: Sequence[str]) -> Sequence[str]:
        return given[: given.index("--")] if "--" in given else given

    def _known(self, text: str) -> bool:
        """Whether argparse takes ``text`` for one of our options or for a value."""
        if not text.startswith("-") or text == "-" or " " in text or self._negative_number_matcher.match(text):
            return True
        return text.partition("=")[0] in self._option_string_actions

    def _suggestion(self, unknown: str) -> str:
        name = unknown.lstrip("-").replace("_", "-").lower()
        options = {option.lstrip("-").replace("_", "-"): option for option in reversed(self._option_string_actions)}
        found = self.meant.get(name) or options.get(name)
        if found is None:
            near = difflib.get_close_matches(name, options, n=1, cutoff=0.6)
            found = options[near[0]] if near else None
        return f" (did you mean {found}?)" if found else f", accepted: what {self.prog} --help lists"

    def _names_of_values(self, option: str) -> str:
        metavar = getattr(self._option_string_actions.get(option), "metavar", None)
        return f" ({' '.join(metavar)})" if isinstance(metavar, tuple) else ""

    def _in_our_words(self, message: str) -> str:
        """argparse's message as "--option: got ..., accepted: ..."."""
        if message.startswith(_REQUIRED):
            names = [one.partition("/")[0] for one in message.removeprefix(_REQUIRED).split(", ")]
            return f"{', '.join(names)}: missing, accepted: a value for each ({self.prog} --help)"
        about = _ARGUMENT.fullmatch(message)
        if about is None:
            return message
        option, what = about[1].partition("/")[0], about[2]
        if choice := _CHOICE.fullmatch(what):
            what = f"got {choice[1]}, accepted: {choice[2].replace(chr(39), '')}"
        elif several := _SEVERAL.fullmatch(what):
            what = f"got fewer values, accepted: {several[1]}{self._names_of_values(option)}"
        elif what.startswith("expected "):
            what = f"got no value, accepted: {'one or more' if 'at least' in what else 'one'}"
        elif what.startswith("ignored explicit argument"):
            what = f"got {what.rpartition(' ')[2]}, accepted: no value"
        return f"{option}: {what}"


def whole_number(text: str) -> int:
    """A whole number, as a type of an option."""
    if re.fullmatch(r"[-+]?[0-9]{1,20}", text) is None or abs(int(text)) >= LARGEST:
        raise argparse.ArgumentTypeError(f"got {text!r}, accepted: a whole number in digits, below {LARGEST:.0e}")
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
    """A path, as a type of an option; ``~`` is a home folder also behind "=", where shells leave it as it is."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"got {text!r}, accepted: a path")
    return os.path.expanduser(text)


def _rank() -> int:
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdigit() else 0


def add_parallel_options(group: Any) -> None:
    """How ranks share a model, of programs that train or plan."""
    group.add_argument(
        "--tensor-parallel", type=whole_number, default=1, metavar="N", help="ranks that share every layer"
    )
    group.add_argument(
        "--expert-parallel",
        type=whole_number,
        default=1,
        metavar="N",
        help="data-parallel ranks that divide the experts of every layer among themselves",
    )
    group.add_argument("--sequence-parallel", action="store_true", help="also share the tokens between layers")


def add_pipeline_options(group: Any) -> None:
    """How stages share the layers of a model, of programs that train or plan."""
    group.add_argument(
        "--pipeline-parallel", type=whole_number, default=1, metavar="P", help="stages that the layers are divided over"
    )
    group.add_argument(
        "--virtual-stages",
        type=whole_number,
        default=1,
        metavar="V",
        help="parts of the model in each stage (interleaved schedule): a smaller bubble, more communication",
    )


def one_stage_only(args: argparse.Namespace, why: str) -> list[str]:
    """A line for each option of pipelines that a program does not honour."""
    return [
        f"--{name.replace('_', '-')}: got {getattr(args, name)}, accepted: 1 ({why})"
        for name in ("pipeline_parallel", "virtual_stages")
        if getattr(args, name) != 1
    ]

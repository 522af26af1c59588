"""Command line of ``scaling.py``, checked."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterable, Sequence

from coat_dist import CoatConfigError
from launch.command_line import DefaultsHelp, Parser, add_parallel_options, local_path, whole_number
from launch.log_level import add_log_level
from launch.plan.gpus import GPUS
from launch.plan.recompute import add_recompute_options, check_recompute

from .predict import NIC, NVLINK, Link

__all__ = ["MOST", "VARIANTS", "links", "parse", "sub_groups"]

VARIANTS = ("coat", "bf16")
"""With the "coat" block and without."""
MOST = 2**20
"""GPUs of a cluster that is predicted."""
_ALWAYS = {"deepspeed", "log_level", "output", "predict", "link", "gpus_per_node"}
_PAPER = {"paper", "gpu", "model", "model_override", "vocab_size", "deepspeed_config"}
_MEASURED = {"measured", "hold_out"}
_NO_COLLECTIVES = ("model", "model_override", "vocab_size", "micro_batch", "accumulation", "variants", "predict")


def _several(one: Callable[[str], int], name: str) -> Callable[[str], tuple[int, ...]]:
    def read(text: str) -> tuple[int, ...]:
        try:
            found = tuple(one(part) for part in text.replace(",", " ").split())
        except (argparse.ArgumentTypeError, CoatConfigError):
            found = ()
        if not found or min(found) < 1:
            raise argparse.ArgumentTypeError(f"got {text!r}, accepted: {name}, with commas between")
        return tuple(sorted(set(found)))

    return read


def _bytes(text: str) -> int:
    units = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
    for unit, factor in units.items():
        if text.lower().endswith(unit):
            return whole_number(text[: -len(unit)]) * factor
    return whole_number(text)


def _variants(text: str) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(text.replace(",", " ").split()))
    if not found or set(found) - set(VARIANTS):
        raise argparse.ArgumentTypeError(f"got {text!r}, accepted: {', '.join(VARIANTS)}, with commas between")
    return found


def parser() -> argparse.ArgumentParser:
    """The options, in the groups that ``--help`` shows."""
    p = Parser(
        prog="scaling.py",
        description="Measure training and collectives on 1, 2, 4, ... of the ranks that are here, "
        "and predict larger clusters. Started by `torchrun launch/scaling.py ...` or `deepspeed "
        "launch/scaling.py ...` (srun: `srun python ...`) on one node or several, or by its path on one.",
        formatter_class=DefaultsHelp,
    )
    g = p.add_argument_group("what is trained, as for pretrain.py")
    g.add_argument("--model", type=local_path, default=None, metavar="FILE", help="a path, or a name such as llama2-7b")
    g.add_argument("--model-override", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="other values")
    g.add_argument(
        "--vocab-size", type=whole_number, default=None, metavar="N", help="where the model names none (default: 32000)"
    )
    g.add_argument(
        "--deepspeed_config",
        "--deepspeed-config",
        type=local_path,
        default="zero2",
        metavar="FILE",
        help="DeepSpeed JSON: a path, or a name such as zero2",
    )
    add_parallel_options(g)
    g.add_argument("--micro-batch", type=whole_number, default=None, metavar="N", help="(default: the configuration's)")
    g.add_argument("--accumulation", type=whole_number, default=None, metavar="N", help="of weak scaling (default: 1)")
    add_recompute_options(g)
    g.add_argument("--deepspeed", action="store_true", help="accepted for habit; DeepSpeed always runs")
    g = p.add_argument_group("what is measured")
    g.add_argument(
        "--output",
        type=local_path,
        default=None,
        metavar="DIR",
        help="where everything is written (default: runs/scaling)",
    )
    ranks = _several(whole_number, "numbers of ranks")
    g.add_argument("--ranks", type=ranks, default=None, metavar="N,N", help="sub-groups (default: 1, 2, 4, ... all)")
    g.add_argument("--gpus", type=whole_number, default=None, metavar="N", help="ranks to start, without a launcher")
    g.add_argument(
        "--variants", type=_variants, default=VARIANTS, metavar="NAME,NAME", help="coat: with the block; bf16: without"
    )
    g.add_argument("--only", choices=["collectives", "training"], default=None, help="measure nothing else")
    g.add_argument("--no-strong", action="store_true", help="weak scaling alone")
    g.add_argument("--steps", type=whole_number, default=10, metavar="N", help="timed, of each size")
    g.add_argument("--warmup", type=whole_number, default=3, metavar="N", help="before them")
    sizes = _several(_bytes, "sizes such as 64KiB,16MiB")
    g.add_argument("--message-sizes", type=sizes, default=None, metavar="SIZE,SIZE", help="of collectives")
    g.add_argument("--timeout-minutes", type=whole_number, default=10, metavar="N", help="of a collective")
    g.add_argument("--overwrite", action="store_true", help="drop what another run has measured in --output")
    g = p.add_argument_group("what is predicted")
    g.add_argument("--predict", type=ranks, default=(), metavar="N,N", help="ranks of larger clusters")
    g.add_argument(
        "--measured", type=local_path, default=None, metavar="DIR", help="an earlier --output; measure nothing"
    )
    g.add_argument(
        "--hold-out",
        type=whole_number,
        default=None,
        metavar="N",
        help="predict these measured ranks from fewer, and compare (default: the most)",
    )
    g.add_argument(
        "--gpus-per-node", type=whole_number, default=None, metavar="N", help="(default: as started here, else 8)"
    )
    g.add_argument(
        "--link",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=BANDWIDTH[,LATENCY]",
        help="in place of what was measured: nvlink=400GB/s,3us within a node, nic=400Gb/s,8us between nodes",
    )
    g.add_argument(
        "--paper",
        action="store_true",
        help="measure nothing: the fastest layout of --model (default: 7B, 70B, 405B) on --predict GPUs, by the "
        "planner's rates",
    )
    g.add_argument("--gpu", choices=list(GPUS), default="h100", help="of --paper")
    add_log_level(p)
    return p


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line; what is typed wrong is one line, with status 2.

    Raises:
        CoatConfigError: a line for each argument.
    """
    options = parser()
    args = options.parse_args(_without_local_rank(argv))
    problems = check_recompute(args)

    def require(name: str, good: bool, accepted: str) -> None:
        if not good:
            given = getattr(args, name.replace("-", "_"))
            problems.append(f"--{name}: {'missing' if given is None else f'got {given!r}'}, accepted: {accepted}")

    for name in ("tensor-parallel", "steps", "timeout-minutes"):
        require(name, getattr(args, name.replace("-", "_")) >= 1, "an integer >= 1")
    require("warmup", args.warmup >= 0, "an integer >= 0")
    for name in ("micro-batch", "accumulation", "vocab-size", "gpus", "hold-out", "gpus-per-node"):
        value = getattr(args, name.replace("-", "_"))
        require(name, value is None or value >= 1, "an integer >= 1")
    require("predict", not args.predict or max(args.predict) <= MOST, f"numbers up to {MOST}")
    require(
        "sequence-parallel",
        not args.sequence_parallel or args.tensor_parallel > 1,
        "only with --tensor-parallel 2 or more",
    )
    launched = "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", 1)) > 1
    require("gpus", args.gpus is None or not launched, "only without a launcher, which says how many there are")

    def refuse(names: Iterable[str], why: str) -> None:
        """Nothing that was given is ignored."""
        given = {name: getattr(args, name) for name in names if getattr(args, name) != options.get_default(name)}
        problems.extend(f"--{k.replace('_', '-')}: got {v!r}, accepted: not with {why}" for k, v in given.items())

    if args.paper:
        refuse(vars(args).keys() - _ALWAYS - _PAPER, "--paper, which measures nothing")
    elif args.measured is not None:
        refuse(vars(args).keys() - _ALWAYS - _MEASURED, "--measured, which has its own")
    else:
        args.output = args.output or "runs/scaling"
        if args.only == "collectives":
            refuse(_NO_COLLECTIVES, "--only collectives")
        else:
            require("model", args.model is not None, "a description (or --only collectives)")
    if problems:
        raise CoatConfigError("\n".join(problems))
    links(args)
    return args


def _without_local_rank(argv: Sequence[str] | None) -> list[str] | None:
    """The deepspeed command adds ``--local_rank=N``, which its variables say, too."""
    import sys

    given = list(sys.argv[1:] if argv is None else argv)
    return [one for one in given if not one.startswith(("--local_rank=", "--local-rank="))]


_NUMBER = r"(\d+(?:\.\d+)?)"
_LINK = re.compile(rf"(nvlink|nic)={_NUMBER}([kmgtKMGT])([bB])/s(?:,{_NUMBER}(ns|us|ms))?")
_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ns": 1e-9, "us": 1e-6, "ms": 1e-3}


def links(args: argparse.Namespace) -> dict[str, Link]:
    """Links "inside" a node and "between" nodes that ``--link`` gives.

    Raises:
        CoatConfigError: another spelling.
    """
    found: dict[str, Link] = {}
    for text in args.link:
        said = _LINK.fullmatch(text)
        if said is None or not float(said[2]):
            raise CoatConfigError(
                f"--link: got {text!r}, accepted: NAME=BANDWIDTH[,LATENCY] of a GPU in one direction, such as "
                "nvlink=400GB/s,3us (within a node) or nic=400Gb/s (between nodes; b are bits)"
            )
        where, assumed = ("between", NIC) if said[1] == "nic" else ("inside", NVLINK)
        rate = float(said[2]) * _UNITS[said[3].lower()] / (8 if said[4] == "b" else 1)
        latency = float(said[5]) * _UNITS[said[6]] if said[5] else assumed.latency
        found[where] = Link(rate, latency, source="given")
    return found


def sub_groups(args: argparse.Namespace, world: int) -> list[int]:
    """Numbers of ranks to measure, of ``world`` that are here.

    Raises:
        CoatConfigError: more than there are, or no multiple of ``--tensor-parallel``.
    """
    tp = args.tensor_parallel
    if world % tp:
        raise CoatConfigError(f"--tensor-parallel: got {tp}, accepted: a divisor of the number of ranks ({world})")
    if args.ranks is None:
        found, size = [], tp
        while size < world:
            found.append(size)
            size *= 2
        return [*found, world]
    for one in args.ranks:
        if one > world or one % tp:
            raise CoatConfigError(
                f"--ranks: got {one}, accepted: up to {world}, the ranks that were started"
                + (f", multiples of --tensor-parallel ({tp})" if tp > 1 else "")
            )
    return list(args.ranks)

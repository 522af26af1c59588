"""``evaluate`` on ranks of this machine."""

from launch import evaluate as program
from launch.evaluation import arguments
from tests.support import run_ranks


def rank_main(rank, world, argv):
    """``evaluate`` in a process group that exists: its result, or the error."""
    from launch.train import runtime

    try:
        device = runtime.start(rank)
        return program.evaluate(arguments.parse(argv), device)
    except program.USER_ERRORS as problem:
        return f"{type(problem).__name__}: {problem}"


def evaluated(*argv, ranks=1):
    first, *others = run_ranks(ranks, rank_main, [str(a) for a in argv])
    for other in others:
        assert other == first
    return first

"""Check token files of Dolma or OLMo and index their documents, before a run does so on its GPUs.

    python launch/index_tokens.py dolma.json

`launch/pretrain.py --data dolma.json` finds the index and reads the tokens where they lie.
docs/data.md describes the file. A run that was killed goes on with the next token file. Exit
status: 0 done, 2 a description or token file that cannot be used, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from launch.common.command_line import Parser, local_path
from launch.common.errors import DataError
from launch.common.log_level import add_log_level, say, set_log_level
from launch.data.mixture import read_mixture
from launch.data.token_files import TokenFiles, build_index, cache_folder

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """The program; its exit status."""
    p = Parser(
        prog="index_tokens.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "mixture", type=local_path, metavar="FILE", help="description of token files, JSON or YAML"
    )
    where = "as it is given to pretrain.py (default: FILE.cache)"
    p.add_argument("--data-cache", type=local_path, metavar="DIR", help=where)
    add_log_level(p)
    args = p.parse_args(argv)
    set_log_level(args.log_level)
    try:
        mixture = read_mixture(args.mixture)
        index = build_index(mixture, cache_folder([args.mixture], args.data_cache))
        found = [
            TokenFiles(source, path) for source, path in zip(mixture.sources, index, strict=True)
        ]
        weights = [
            source.weight or float(files.tokens)
            for source, files in zip(mixture.sources, found, strict=True)
        ]
        say(f"{'source':<20}{'files':>8}{'documents':>16}{'tokens':>20}{'share of samples':>18}")
        for source, files, weight in zip(mixture.sources, found, weights, strict=True):
            counts = f"{len(source.files):>8,}{len(files):>16,}{files.tokens:>20,}"
            say(f"{source.name:<20}{counts}{weight / sum(weights):>18.4f}")
    except (DataError, OSError) as problem:
        print(
            f"error: {problem}".replace("error: cache_dir:", "error: --data-cache:"),
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print("index_tokens: interrupted; the same command continues", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

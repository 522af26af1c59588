"""Console scripts of an installed package: ``coat-pretrain`` is ``python -m launch.pretrain``."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> None:
    """Run the program that the script is named after."""
    name = Path(sys.argv[0]).stem.removeprefix("coat-").replace("-", "_")
    # As __main__: programs set what torch reads before they import it, and end their workers.
    runpy.run_module(f"launch.{name}", run_name="__main__", alter_sys=True)

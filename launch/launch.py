"""Stands in for the package ``launch`` where a program was started by its path, and imports it.

``python launch/pretrain.py`` puts this folder first on ``sys.path``, where any ``import data``
would find ours, and ``import launch`` this file. The project's folder takes its place.
"""

import importlib
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])
del sys.modules[__name__]
importlib.import_module("launch")

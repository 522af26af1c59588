"""Marks of single cases."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """A case of a parametrization that ``make test-all`` and ``pytest -m slow`` run."""
    return pytest.param(*values, marks=pytest.mark.slow)

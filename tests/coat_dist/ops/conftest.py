"""What the tests of operations share."""

import importlib

import pytest


@pytest.fixture
def agreement(request):
    """How the kernel of this file's operation must agree with its definition: norm_agreement.py
    for test_norm.py.
    """
    pytest.importorskip("triton")
    return importlib.import_module(request.module.__name__.replace(".test_", ".") + "_agreement")

"""Fixtures of the flow's tests."""

import importlib
from typing import NamedTuple

import pytest
import torch

from coat_dist.formats import QuantizedTensor


class Product(NamedTuple):
    a: QuantizedTensor
    b: QuantizedTensor
    dtype: torch.dtype


@pytest.fixture
def products(monkeypatch):
    """Operands and dtype of every FP8 product, in the order in which they ran."""
    seen = []

    def noted(original):
        def product(a, b, dtype, *rest, **options):
            seen.append(Product(a, b, dtype))
            return original(a, b, dtype, *rest, **options)

        return product

    for name in (
        "blocks.linear",
        "blocks.mlp",
        "core.input_product",
        "core.weights",
        "core.main_grad",
    ):
        module = importlib.import_module(f"coat_dist.flow.{name}")
        for function in {"gemm", "summed_gemm"} & vars(module).keys():
            monkeypatch.setattr(module, function, noted(getattr(module, function)))
    return seen

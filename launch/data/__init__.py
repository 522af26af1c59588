"""Tokenizers, and training data read from what ``prepare_data.py`` wrote."""

from typing import Any

__all__ = ["build_datasets"]


def __getattr__(name: str) -> Any:
    if name == "build_datasets":  # imported on use: tokenizers need neither torch nor Megatron
        from launch.data.dataset import build_datasets

        return build_datasets
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

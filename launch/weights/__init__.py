"""Weights of whole models, wherever they come from: a Hugging Face folder, a converted one, a training checkpoint.

    weights = open_weights("path/to/folder")
    model = build_model(weights.model, tp=2)
    fill(model, weights)

Names are those of Megatron's parameters, layers are numbered through all pipeline stages, and tensors are whole.
"""

from launch.weights.fill import fill
from launch.weights.open import open_weights
from launch.weights.source import Weights

__all__ = ["Weights", "fill", "open_weights"]

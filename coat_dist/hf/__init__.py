"""The FP8 flow in built transformers models.

``patch.py`` decides what runs how, ``recognize.py`` says what a module computes, by the code of its
forward. ``layer.py`` has decoder layers in one piece, ``modules.py`` norms, projections and MLPs by
themselves, ``loss.py`` the loss without logits. transformers is imported when a model of it is
patched.
"""

from ..patching.changes import unpatch_model
from .loss import log_probs
from .patch import is_transformers_model, patch_model

__all__ = ["is_transformers_model", "log_probs", "patch_model", "unpatch_model"]

"""Old name of ``tests.launch.convert.hf_folders``, for programs outside of the repository."""

from tests.launch.convert.hf_folders import make, tensors

__all__ = ["make", "tensors"]

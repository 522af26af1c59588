"""Split into heads with rotary embedding; the definitions are in ``reference/rope.py``."""

from ..reference import rope as reference
from ..reference.rope import Heads, RopeTable, rope_table
from .dispatch import operation

__all__ = ["Heads", "RopeTable", "rope_table", "split_rope", "split_rope_backward"]

split_rope = operation(reference.split_rope)
split_rope_backward = operation(reference.split_rope_backward)

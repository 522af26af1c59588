"""Parts of ``to_universal.py``: which checkpoint is converted, where the result goes."""

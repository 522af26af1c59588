"""Parts of ``to_universal.py``: its command line, which checkpoint is meant, where the result goes."""

"""Parts of ``evaluate.py``: what is read, how it is scored, what is reported."""

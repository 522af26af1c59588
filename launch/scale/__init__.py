"""Parts of ``scaling.py``: timed steps, and tables of them."""

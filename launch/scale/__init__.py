"""Parts of ``scaling.py``: measuring over sub-groups of ranks, and tables."""

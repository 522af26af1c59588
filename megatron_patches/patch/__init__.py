"""Which parts of a built model are patched, and the change itself: all of a model or none."""

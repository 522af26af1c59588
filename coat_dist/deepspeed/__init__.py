"""The DeepSpeed side: ``coat_dist.initialize``, what it refuses, and what it attaches to DeepSpeed's objects.

``attach.py`` has the one list of what is attached, in its order, with the reason for that order. No module here imports
DeepSpeed when it is imported itself, so ``coat_dist`` works where DeepSpeed is not installed.
"""

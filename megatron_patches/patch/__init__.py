"""Patching of built Megatron models: their blocks, what becomes of each, and the plan of a model.

The mechanism is ``coat_dist/patching``.
"""

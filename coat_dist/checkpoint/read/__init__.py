"""Checks before a checkpoint is loaded."""

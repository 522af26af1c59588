"""The memory planner: what a training step takes of a GPU, and which settings fit."""

"""CUDA graphs of layers, and the memory they share."""

"""Mixins by which Megatron's modules run the flow, and the layer specification."""

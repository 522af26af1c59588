"""Classes that replace those of Megatron's layers, and the layer specification."""

"""Autograd functions of the blocks of a layer: norms, linears, MLPs, experts, attention, losses."""

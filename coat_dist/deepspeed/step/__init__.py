"""What is replaced on a built engine: the step's passes, weights, gradients, accessors, FP8
gathers.
"""

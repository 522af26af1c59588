"""What is decided before or while DeepSpeed builds an engine: groups of ranks, pipelines,
replicated gradients.
"""

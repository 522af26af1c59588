"""Ranks that divide a model: pipelines, experts, replicated gradients."""

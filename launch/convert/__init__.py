"""Weights of whole models from other layouts, and into them: Hugging Face folders, training
checkpoints, universal checkpoints.
"""

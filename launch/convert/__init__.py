"""Hugging Face folders: which families of models are known, and how their names and layouts are
Megatron's.
"""

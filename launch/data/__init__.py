"""Tokenizers, preparation of data, and training data read from what ``prepare_data.py`` wrote."""

"""Conversations for fine-tuning: read, rendered by a chat template, masked, packed and handed to
training.
"""

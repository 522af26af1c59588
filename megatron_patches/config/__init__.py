"""Megatron's ``TransformerConfig``: which values of its fields are honoured."""

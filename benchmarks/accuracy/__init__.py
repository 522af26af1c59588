"""Errors of one layer, one step or one encoding against exact arithmetic."""

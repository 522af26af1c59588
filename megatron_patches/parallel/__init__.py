"""Engines of DeepSpeed, pipeline stages, and what ranks exchange beside
DeepSpeed.
"""

"""Collectives of the flow: tensor parallelism, FP8 gathers, products that overlap with
transfers.
"""

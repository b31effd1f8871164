"""Faults on purpose: orders, and what carries them out on a node.

The driver imports it.
"""

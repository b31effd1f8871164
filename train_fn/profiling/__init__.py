"""Profiles of steps on request, and the trace that is kept of them.

The loop imports it.
"""

"""What a process knows and does of its machine: directories, network, devices, memory, cores, and
checks before a start.

Imports nothing of the loop.
"""

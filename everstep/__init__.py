"""Everstep: elastic, fault-tolerant PyTorch training over HTTP."""

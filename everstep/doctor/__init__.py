"""Findings of a deployment check: what is wrong and what to do, from the reports of the nodes.

Imports `everstep.wire` only. The CLI and the cluster's own check import it.
"""

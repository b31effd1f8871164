"""What a check of a deployment means: findings and advice from the report that the nodes wrote.

Imports `everstep.wire` only. The CLI and the cluster's own check import it.
"""

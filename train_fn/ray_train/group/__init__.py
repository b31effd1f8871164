"""The worker group of an attempt: where its ranks go, which nodes are fit for them, how it starts,
is watched and ends, and the processes and states that outlive it.
"""

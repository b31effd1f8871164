"""The control plane: API, pages, database, reconciler, and the annexes beside them.

Begins in ``process``. A run comes in by ``runs``, and is started and followed by ``reconciler``.
"""

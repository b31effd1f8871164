"""The backend for ranks over Ray Train: trainer, controller, worker group, placement, and the
private names of Ray that they touch. The driver imports it; the loop never does.

**A new backend** is a room beside this one. It implements what `rank` does here and
``standalone/rank.py`` without Ray, in the simplest way: start a process for each rank, form the
process group, give the loop a ``WorkerContext`` with a ``JournalClient`` (``train_fn/context.py``),
call ``loop/attempt.py``, and say what became of it. What died, and what follows, it asks of
``train_fn/recovery``.
"""

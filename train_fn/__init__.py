"""What runs on the Ray cluster: the driver of a submission, the ranks and their training loop.

Read ``session/session.py`` first, then ``loop/attempt.py``. A rank begins in ``ranks/zygote.py``,
without Ray in ``standalone/rank.py``.
"""

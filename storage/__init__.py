"""Bytes and facts in a run's directory, and who may write them: checkpoints, journals, logs, code.

``run_dir`` has the layout, ``claims`` says which attempt owns a run.
"""

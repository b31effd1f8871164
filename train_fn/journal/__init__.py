"""Events on their way from ranks, controller and driver to the run's journal, and to TensorBoard
and MLflow.

Imports no loop. The driver runs the server; ranks hold clients.
"""

"""Events on their way from ranks, controller and driver to the run's journal, and to TensorBoard
and MLflow.

`client` delivers events, `server` writes them. Imports no loop and no Ray: under Ray the server is
an actor in `ray_train`.
"""

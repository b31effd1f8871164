"""The Ray cluster as the service sees it, over HTTP: jobs and nodes.

Imports the model. The reconciler, the API, the pages, annexes and the embedded cluster import it.
"""

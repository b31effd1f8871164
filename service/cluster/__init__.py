"""The Ray cluster as the service sees it, over HTTP: jobs, nodes, and checks of a deployment.

Imports the model and the database. The reconciler, the API and the embedded cluster import it.
"""

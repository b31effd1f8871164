"""The Ray cluster as the service sees it, over HTTP: jobs, nodes, checks of a deployment, and
Ray's dashboard for people.

Imports the model and the database. The reconciler, the API, the pages and the embedded cluster
import it.
"""

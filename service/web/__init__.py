"""The web pages, rendered on the server with the API's own functions.

Imports the API, the database, the cluster and the model; `service.process` mounts it.
"""

"""The REST API: routes, authentication, paging, streams and problem responses.

Imports the database, projections, the model and the views of the cluster. The web pages use the
same functions.
"""

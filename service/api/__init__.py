"""What all routes of the REST API share: authentication, paging, streams, problems, OpenAPI.

Imports the database, projections, the model and the views of the cluster. The web pages use the
same functions.
"""

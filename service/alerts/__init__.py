"""Messages on their way out of the service: alerts in each receiver's format, and webhooks.

The reconciler's leader sends them. Which addresses may be called is decided here. Imports the
database's rows, and no API.
"""

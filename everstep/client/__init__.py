"""The Python SDK: `Client`, the handles that it returns, and its HTTP transport.

Imports `everstep.spec`, `everstep.wire`, `everstep.code` and `everstep.errors`. The CLI imports it.
"""

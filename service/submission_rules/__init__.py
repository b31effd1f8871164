"""The checks of a submission by the operator's rules: user code, packages, storage roots, webhooks.

Imports no other room. The API calls the checks; the settings hold the rules.
"""

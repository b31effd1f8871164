"""The options of ``everstep serve``, each declared once.

``serve`` is the declaration: a field for each option. ``model`` reads such fields from flags and
environment, checks each value, and says what is wrong in words. The command line, the service's
settings and docs/settings.md use them.
This room imports only ``errors`` and ``home``.
"""

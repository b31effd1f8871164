"""The RunSpec: its sections, the catalog of built-in tasks, parsing, YAML files, overrides and
error messages.

The one place where a field of a spec is validated. Imports `everstep.errors` and the rules of
`everstep.code`; every house imports it.
"""

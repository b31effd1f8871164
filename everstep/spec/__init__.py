"""The RunSpec: its model, the catalog of built-in tasks, YAML files, overrides, and how faults are
reported.

The one place where a field of a spec is validated. Imports `everstep.errors` and the rules of
`everstep.code`; every house imports it.
"""

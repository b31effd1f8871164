"""Words that people read in more than one place: statuses, failures, durations, close names.

Imports `everstep.wire` only. The CLI imports it.
"""

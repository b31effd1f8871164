"""Sweeps: a pure engine (`decide`, `halving`) says which runs of a sweep start, pause, go on and
end; `driver` carries that out on the runs in the database. The reconciler calls it. May import db,
model and everstep; nothing of Ray, storage or the API.
"""

"""What Everstep refuses of a user's code, or warns of: one story a file, one class or function a
mistake.

`check` has the interface: a check names the moments at which it is made and what it costs, and
changes nothing. The loop and `es.protect` register what applies to them and call the room by one
line at each moment. docs/checks.md lists every refusal; `scripts/checks_reference.py` writes it.
Imports `state`, `tasks`, `step` and `samples`; the loops import it.
"""

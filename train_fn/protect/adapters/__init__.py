"""Adapters of `protect` to other people's training libraries.

`accelerate` protects what an Accelerator prepared, and imports no library. `hugging_face` and
`lightning` hold the callback of a Trainer; they import its library, and are imported by name when
`everstep.train` is asked for them. `trainer_state` and `lightning_state` hold what those libraries
keep themselves. Imports the room around it.
"""

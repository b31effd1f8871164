"""Adapters of `protect` to other people's training libraries.

`accelerate` protects what an Accelerator prepared, and imports no library. `hugging_face` and
`lightning` hold the callback of a Trainer; they import its library, and are imported by name when
`everstep.train` is asked for them. `trainer_state` holds what Hugging Face's Trainer keeps itself.
Imports the room around it.
"""

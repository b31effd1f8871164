"""Protection for a user's own training loop: `everstep.train.protect` and `loader`.

`protected` is the context manager that a loop uses, and a step in order. `training` builds what its
steps use; `departure` decides what is kept when it breaks. `loop_state` holds the state, `shadows`
copies of it, `volatile` what forward passes change. `commits` is what the ranks exchange once
a step. `boundary` says where a step ends,
`part_copies` holds what a loop changes between two of them, `gradients` what no state would hold.
`arguments` checks what the loop gives, `batches` is the loader, `followed` that of a DataLoader,
`batch_marks` and `last_batch` compare batches, `draws` keeps samplers' generators, `adapters` know
other people's trainers, `place` finds the run. Imports the loop's parts and `standalone`; nothing
of ours imports it but the door `everstep.train`, by name.
"""

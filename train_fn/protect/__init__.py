"""Protection for a user's own training loop: `everstep.train.protect` and `loader`.

`protected` is the context manager that a loop uses, `arguments` checks what it is given,
`loop_state` holds the state, `volatile` what forward passes change, `agreement` is what the ranks
exchange once a step, `batches` is the loader, `place` finds the run. Imports the loop's parts and
`standalone`; nothing of ours imports it but the door `everstep.train`, by name.
"""

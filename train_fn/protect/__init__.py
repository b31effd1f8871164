"""Protection for a user's own training loop: `everstep.train.protect` and `loader`.

`protected` is the context manager that a loop uses, and a step in order. `training` builds what its
steps use, finds the run, and decides what is kept when the loop breaks. `loop_state` holds the
state, `changes` what the loop changes without its optimizer. `commits` is what the ranks exchange
once a step, and where one ends. `arguments` checks what the loop gives, `batches` is the loader,
`followed` that of a DataLoader, whose order is `data_order`'s; `adapters` know other people's
trainers. What is refused is in `checks`. Lives by `session`; only the door `everstep.train` imports
it.
"""

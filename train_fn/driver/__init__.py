"""The driver of one submission: a Ray Job's entrypoint, ``python -m train_fn.driver --storage URI
--run-id ID --submission N``. `command` is the program, `supervision` follows the submission to its
end, `fit_loop` runs one Train controller after the other, `submission_journal` is what the driver
reports to. Imports Ray and the room of its private names; the loop only by name.

Exit codes: 0 when the journal's ``finished`` event is written, whatever the outcome; 3 when a newer
submission has taken over; 4 when the storage cannot be used, or is not the one that is known. After
anything else the service submits the run again.
"""

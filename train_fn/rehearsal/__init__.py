"""Rehearse a restart on a user's own code: train a few steps undisturbed, train them again with
deaths, and compare step by step. `plan` runs it, `trial` starts the ranks of one training and ends
them, `rank` is one of them, `recorder` notes what each step is made of, `comparison` says what is
first different. Imports the loop, `protect` and `standalone`, and no Ray but for Ray's functions.
"""

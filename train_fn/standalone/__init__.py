"""The training loop without Ray and without the service: under torchrun, or as one process that a
debugger can step through. `command` is the program, `rank` one rank of it. Imports the loop.

    torchrun --nproc-per-node 2 -m train_fn.standalone SPEC.yaml \\
        --storage /mnt/shared/everstep --run-id digits
    torchrun --nproc-per-node 2 -m train_fn.standalone SPEC.yaml --code . --task my_pkg.task:MyTask
    everstep run SPEC.yaml --local

Loop, data order, checkpoints and journal are those of a run under the service. The same command
again continues the run: processes that torchrun itself restarts from the newest state on their
nodes, others from the newest checkpoint.

Exit codes: 0 when all steps are done, 1 when training failed, 2 for a wrong request, 75 when it was
asked to stop and can continue.
"""

"""``python -m train_fn.driver``: what the service submits as a Ray Job."""

import platform
import sys

from everstep.supported import problem_here

if problem := problem_here(f"the driver's node ({platform.node()})", "ray", "torch"):
    sys.exit(f"everstep: {problem}")  # before what needs private names of either is imported

from train_fn.driver.command import main

if __name__ == "__main__":
    sys.exit(main())

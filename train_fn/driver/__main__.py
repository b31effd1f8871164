"""``python -m train_fn.driver``: what the service submits as a Ray Job."""

import sys

from train_fn.driver.command import main

if __name__ == "__main__":
    sys.exit(main())

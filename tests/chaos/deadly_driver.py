"""The driver with the deadly loop in place of the loop."""

from __future__ import annotations

import sys

from train_fn.driver.command import main

if __name__ == "__main__":
    sys.exit(main(train="tests.chaos.deadly_loop:train"))

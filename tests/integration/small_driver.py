"""The driver with the small training function of these tests in place of the loop."""

from __future__ import annotations

import sys

from train_fn.driver.command import main

if __name__ == "__main__":
    sys.exit(main(train="tests.integration.small_loop:train"))

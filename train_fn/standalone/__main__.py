"""``python -m train_fn.standalone``: what torchrun starts as each rank."""

from everstep.spec.code import fix_hash_seed

if __name__ == "__main__":
    fix_hash_seed()  # before torch is imported: the program may start again

import sys

from train_fn.standalone.command import main

if __name__ == "__main__":
    sys.exit(main())

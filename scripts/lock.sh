#!/usr/bin/env bash
# Write constraints.txt from the environment of the interpreter $1, then the locks with hashes. Local version labels (torch's +cpu)
# and the packages that only one build of torch brings (nvidia-*, cuda-*, triton) are left out: pip resolves CPU or CUDA, and torch's
# own metadata names their versions.
set -euo pipefail
"$1" -m pip freeze --exclude-editable --disable-pip-version-check |
    sed -E 's/\+[a-z0-9.]+$//; s/ @ .*//' |
    grep -v -i -P '^((everstep|pip|setuptools|wheel|triton)==|cuda-|nvidia-(?!ml-py==))' >constraints.txt
echo "constraints.txt: $(wc -l <constraints.txt) packages"
"$1" scripts/hash_lock.py

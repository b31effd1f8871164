#!/usr/bin/env bash
# Write constraints.txt from the environment of the interpreter $1. Local version labels (torch's +cpu) and the packages that
# only one build of torch brings (nvidia-*, triton) are left out: pip resolves CPU or CUDA.
set -euo pipefail
"$1" -m pip freeze --exclude-editable --disable-pip-version-check |
    sed -E 's/\+[a-z0-9.]+$//; s/ @ .*//' |
    grep -v -i -E '^(everstep|pip|setuptools|wheel|triton|nvidia-|cuda-)' >constraints.txt
echo "constraints.txt: $(wc -l <constraints.txt) packages"

#!/usr/bin/env bash
# Make the virtual environment $1 and install Everstep with everything pinned. Says what it does; asks nothing.
set -euo pipefail
venv=$1

usable() {  # an interpreter that runs, has the right version and can make environments with pip
    "$1" -c 'import ensurepip, venv, sys; sys.exit(not ((3, 11) <= sys.version_info[:2] <= (3, 12)))' >/dev/null 2>&1
}

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.12 python3.11 python3; do
        if [ -n "$candidate" ] && command -v "$candidate" >/dev/null && usable "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

if [ ! -x "$venv/bin/python" ]; then
    if ! python=$(find_python); then
        if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
            echo "==> Installing Debian's python3-venv"
            apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3-venv >/dev/null
        fi
        if ! python=$(find_python); then
            echo "No Python 3.11 or 3.12 with the venv module was found. Install one (on Debian and Ubuntu:" >&2
            echo "sudo apt-get install python3-venv) or name it: make PYTHON=/path/to/python3.12 …" >&2
            exit 1
        fi
    fi
    echo "==> Making $venv with $("$python" --version)"
    "$python" -m venv "$venv"
fi
echo "==> Installing pinned dependencies (PyTorch and Ray are large: a few minutes the first time)"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[server,dev,adapters,docs,wandb]'
echo "==> Installed: $("$venv/bin/python" -c 'from importlib.metadata import version as v; print(", ".join(f"{p} {v(p)}" for p in ("everstep", "torch", "torchvision", "ray")))')"

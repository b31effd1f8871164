#!/usr/bin/env bash
# get-test-tools.sh: programs that tests run and .venv has not, because they need other versions of packages than .venv, or many more
# (generators of clients). Into out/tools, once for each change of their pins in tests/tools.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(realpath --no-symlinks "${PYTHON:-.venv/bin/python}")
failed=0

# install NAME PINS COMMAND…: run the command in an empty directory, which becomes out/tools/NAME if it ends well
install() {
    local name=$1 pins=$2 target work
    shift 2
    target=$PWD/out/tools/$name
    pins=$PWD/tests/tools/$pins
    if cmp --silent "$pins" "$target/pins"; then return; fi
    echo "==> Getting $name into out/tools"
    mkdir -p out/tools
    work=$(mktemp -d "$target.XXXXXX")
    if (cd "$work" && "$@" >"$work/log" 2>&1); then
        cp "$pins" "$work/pins"
        rm -rf "$target"
        mv "$work" "$target"
    else
        tail -n 5 "$work/log" >&2
        echo "==> No $name: the test that needs it is skipped" >&2
        rm -rf "$work"
        failed=1
    fi
}

packages() { "$python" -m pip install --quiet --disable-pip-version-check --no-deps --target packages --requirement "$1"; }
modules() { cp "$1"/package*.json . && npm ci --no-audit --no-fund --silent; }

install python-client python-client.txt packages "$PWD/tests/tools/python-client.txt"
if command -v npm >/dev/null; then
    install typescript typescript/package-lock.json modules "$PWD/tests/tools/typescript"
else
    echo "==> No typescript: npm is not installed" >&2
    failed=1
fi
exit "$failed"

#!/usr/bin/env bash
# Make the virtual environment $1 and install Everstep with the extras $2, everything pinned by constraints.txt. Says what it does and
# how long that takes; asks nothing. uv does the work, the one on the path or one that pip gets, since it needs a third of pip's time; pip
# does it where uv fails. Both install the same versions, from the indexes that pip is told. Run it again after an interruption: it goes on.
#   PYTHON       interpreter to use; default the newest of 3.11 to 3.14
#   TORCH_INDEX  index with torch for CPUs, for machines without an NVIDIA GPU; empty for the package index
set -euo pipefail
venv=$1 extras=$2
torch_index=${TORCH_INDEX-https://download.pytorch.org/whl/cpu}
cpu_mb=2500 cuda_mb=9000  # of the environment and of what pip unpacks beside it

fail() {
    echo "$1" >&2
    exit 1
}

timed() {  # say what begins, that it goes on, and how long it took: timed TEXT COMMAND…
    local began=$SECONDS text=$1 ticker ended=0
    shift
    echo "==> $text"
    while sleep 15 >/dev/null 2>&1; do echo "    … $((SECONDS - began)) s"; done &
    ticker=$!
    "$@" || ended=$?
    kill "$ticker" 2>/dev/null && wait "$ticker" 2>/dev/null || true
    [ "$ended" = 0 ] && echo "    $((SECONDS - began)) s"
    return "$ended"
}

has_uv() {  # on the path, where it can also make environments
    type -P uv >/dev/null
}

uv_of_venv() {  # one for installing: that, or the environment's own, which pip gets
    type -P uv && return
    [ -x "$venv/bin/uv" ] || "$venv/bin/python" -m pip install --quiet --disable-pip-version-check uv >/dev/null 2>&1 || true
    [ -x "$venv/bin/uv" ] && echo "$venv/bin/uv"
}

pip_setting() {  # what pip is told by its environment, which counts first, or its files: pip_setting index-url
    sed -nE "s/^(:env:|global|install)\\.$1='(.*)'\$/\\2/p" <<<"$pip_settings" | sed 's/\\n/ /g' | head -1
}

is_there() {  # a directory that pip would read; it leaves out one that is missing, and uv ends at it
    [[ $1 == *://* && $1 != file://* ]] || [ -e "${1#file://}" ]
}

indexes() {  # pip's indexes as options of uv
    local each index
    index=$(pip_setting index-url)
    [ -z "$index" ] || echo "--default-index $index"
    for each in $(pip_setting extra-index-url); do is_there "$each" && echo "--index $each"; done
    for each in $(pip_setting find-links); do is_there "$each" && echo "--find-links $each"; done
    echo "--index-strategy unsafe-best-match"  # pip's: the newest that any index has
}

in_range() {
    "$1" -c 'import sys; sys.exit(not ((3, 11) <= sys.version_info[:2] <= (3, 14)))' >/dev/null 2>&1
}

usable() {  # an interpreter that can make environments with pip; uv needs neither of the two modules
    in_range "$1" && { has_uv || "$1" -c 'import ensurepip, venv' >/dev/null 2>&1; }
}

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        usable "$PYTHON" && echo "$PYTHON"
        return
    fi
    for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
        if command -v "$candidate" >/dev/null && usable "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

refuse_python() {
    local found
    found=$("${PYTHON:-python3}" --version 2>/dev/null || echo "no ${PYTHON:-python3}")
    if [ "$found" = "no python3" ]; then
        fail "Everstep needs Python 3.11 to 3.14, and here is $found. On Debian and Ubuntu: sudo apt-get install python3 python3-venv. Or install uv (https://docs.astral.sh/uv), which gets one."
    fi
    if in_range "${PYTHON:-python3}"; then
        fail "$found has no venv module with pip. Install it (on Debian and Ubuntu: sudo apt-get install python3-venv), or install uv."
    fi
    fail "Everstep needs Python 3.11 to 3.14, and here is $found. Install one of them and name it (make PYTHON=/path/to/python3.13 …), or install uv (https://docs.astral.sh/uv), which gets one."
}

make_environment() {
    local python
    if ! python=$(find_python) && [ -z "${PYTHON:-}" ] && ! has_uv && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "==> Installing Debian's python3-venv"
        apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3-venv >/dev/null || true
    fi
    if ! python=$(find_python); then
        has_uv && [ -z "${PYTHON:-}" ] || refuse_python
        python='>=3.11,<3.15'  # uv gets one
    fi
    if has_uv; then
        timed "Making $venv with uv and Python $python" uv venv --quiet --seed --clear --python "$python" "$venv"
    else
        timed "Making $venv with $("$python" --version)" "$python" -m venv --clear "$venv"
    fi
}

check_directory() {  # this user can write it
    if [ -e "$venv" ] && [ ! -w "$venv" ]; then
        fail "$venv belongs to $(stat -c %U "$venv") and cannot be written. Remove it, or use another: make VENV=/path …"
    fi
    [ -w "$(dirname "$venv")" ] || fail "$(realpath "$(dirname "$venv")") cannot be written. Clone into a directory of your own, or use another environment: make VENV=/path …"
}

check_room() {  # for torch of the kind that comes, and all else: check_room MB TORCH
    local free
    free=$(df --output=avail -BM "$(dirname "$venv")" | tail -1 | tr -dc 0-9)
    [ "$free" -ge "$1" ] || fail "$(realpath "$(dirname "$venv")") has $free MB free, and the environment needs $1 MB with $2. Free some, or put it elsewhere: make VENV=/path …"
}

has_gpu() {
    [ -e /proc/driver/nvidia/version ] || [ -e /dev/nvidiactl ]
}

has_torch() {
    "$venv/bin/python" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null || true
}

install() {
    local uv cert from='' pip_settings
    if uv=$(uv_of_venv); then
        pip_settings=$("$venv/bin/python" -m pip config list 2>/dev/null || true)
        cert=$(pip_setting cert)
        [[ " $* " == *" --index-url "* ]] || from=$(indexes)
        # shellcheck disable=SC2086  # options, without spaces in them
        env UV_SYSTEM_CERTS=1 UV_NATIVE_TLS=1 ${cert:+SSL_CERT_FILE="$cert"} "$uv" pip install --quiet --compile-bytecode --python "$venv/bin/python" \
            $from --constraint constraints.txt "$@" && return
        echo "==> uv failed; pip tries the same"
    fi
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "$@" && return
    echo "==> The installation is not complete; pip says above why. Run the same command again: it goes on." >&2
    return 1
}

answers() {  # whether an index has torch, asked for five seconds
    "$venv/bin/python" -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1].rstrip("/") + "/torch/", timeout=5)' "$1" >/dev/null 2>&1
}

require_index() {  # pip reaches one by its own settings, or has wheels of its own
    local pip_settings index
    pip_settings=$("$venv/bin/python" -m pip config list 2>/dev/null || true)
    [ -z "$(pip_setting find-links)" ] || return 0
    index=$(pip_setting index-url)
    "$venv/bin/python" -m pip index versions setuptools --disable-pip-version-check --retries 1 --timeout 10 >/dev/null 2>&1 ||
        fail "No package index answers (pip asked ${index:-https://pypi.org/simple}). Connect this machine, or name a mirror: PIP_INDEX_URL=https://… make …"
}

install_torch_for_cpus() {  # alone, so that nothing else comes from that index
    if [ -n "$(has_torch)" ]; then
        return
    elif has_gpu; then
        check_room "$cuda_mb" "torch for CUDA"
    elif [ -n "$torch_index" ] && answers "$torch_index"; then
        check_room "$cpu_mb" "torch for CPUs"
        timed "Installing torch without CUDA, since this machine has no NVIDIA GPU" install --index-url "$torch_index" --no-deps torch torchvision
    else
        check_room "$cuda_mb" "the package index's torch, perhaps with CUDA, as no index with torch for CPUs answers (TORCH_INDEX=https://… names one)"
        echo "==> No index with torch for CPUs answers: it comes from the package index, perhaps with CUDA (4 GB more)"
    fi
}

check_directory
"$venv/bin/python" -m pip --version >/dev/null 2>&1 && in_range "$venv/bin/python" || make_environment
[ -n "$(has_torch)" ] || require_index
install_torch_for_cpus
timed "Installing Everstep with $extras (PyTorch and Ray are large)" install --editable ".[$extras]"
echo "==> Installed: $("$venv/bin/python" -c 'from importlib.metadata import version as v; print(", ".join(f"{p} {v(p)}" for p in ("everstep", "torch", "torchvision", "ray")))')"

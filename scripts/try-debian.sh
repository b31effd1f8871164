#!/usr/bin/env bash
# try-debian.sh RELEASE…: README's first command in a fresh clone on other releases of Debian (bookworm, trixie, testing), each with its own
# Python, in a chroot. Needs root and mmdebstrap. Says the seconds of each phase, and fails where the demo does.
#   DEBIAN_DIR  where systems and pip's caches are kept, to begin sooner the next time; default out/debian. Remove it to begin anew
set -euo pipefail
cd "$(dirname "$0")/.."
top=$PWD
kept=$(realpath -m "${DEBIAN_DIR:-out/debian}")
packages=python3,python3-venv,make,git,ca-certificates,procps

[ "$(id -u)" = 0 ] || { echo "A chroot is made as root: run sudo make versions" >&2; exit 2; }
command -v mmdebstrap >/dev/null || { echo "mmdebstrap is missing: apt-get install mmdebstrap" >&2; exit 2; }

configure() {  # what this machine reaches package indexes with
    cp /etc/resolv.conf "$1/etc/resolv.conf"
    cp -a /etc/ssl/certs/. "$1/etc/ssl/certs/"
    local each
    for each in /etc/pip.conf /etc/xdg/pip "$HOME/.config/pip"; do
        [ ! -e "$each" ] || { mkdir -p "$1$(dirname "$each")"; cp -r "$each" "$1$(dirname "$each")"; }
    done
}

demo() {  # in a namespace of its own, whose mounts end with it
    local system=$1 each
    mount --make-rprivate /
    for each in dev dev/shm sys; do mount --rbind "/$each" "$system/$each"; done
    mount -t proc proc "$system/proc"
    chroot "$system" env -i HOME=/root LANG=C.UTF-8 PATH=/usr/sbin:/usr/bin:/sbin:/bin make -C /srv/everstep demo
}
[ "${1:-}" != --demo ] || { demo "$2"; exit; }

for release in "$@"; do
    system=$kept/$release
    began=$SECONDS
    if [ ! -e "$system.made" ]; then
        echo "==> Making Debian $release"
        rm -rf "$system"
        mkdir -p "$kept"
        mmdebstrap --quiet --variant=apt --include="$packages" "$release" "$system"
        touch "$system.made"
    fi
    configure "$system"
    rm -rf "$system/srv/everstep"
    git clone --quiet "$top" "$system/srv/everstep"
    echo "==> Debian $release, $(chroot "$system" python3 --version), after $((SECONDS - began)) s: make demo"
    began=$SECONDS
    unshare --mount scripts/try-debian.sh --demo "$system"
    echo "==> Debian $release: make demo took $((SECONDS - began)) s"
done

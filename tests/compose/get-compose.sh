#!/usr/bin/env bash
# get-compose.sh DIRECTORY: Docker's plugins `compose` (v2) and `buildx` from Debian trixie, unpacked into DIRECTORY/cli-plugins.
# bookworm has no package of Compose v2. trixie's programs need nothing newer than bookworm's libc.
set -euo pipefail
target=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$target/cli-plugins"
"$(dirname "$0")/../../scripts/apt-of-release.sh" "$work" trixie deb
cd "$work"
export APT_CONFIG=$work/apt.conf
apt-get download -qq docker-compose docker-buildx
for package in *.deb; do dpkg-deb --extract "$package" unpacked; done
cp unpacked/usr/libexec/docker/cli-plugins/* "$target/cli-plugins/"

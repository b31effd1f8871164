#!/usr/bin/env bash
# get-compose.sh DIRECTORY: Docker's plugins `compose` (v2) and `buildx` from Debian trixie, unpacked into DIRECTORY/cli-plugins.
# bookworm has no package of Compose v2. trixie's programs need nothing newer than bookworm's libc.
set -euo pipefail
target=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/lists/partial "$work"/cache/archives/partial "$target/cli-plugins"
chmod 755 "$work"
touch "$work/status"
mirror=$(awk '/^URIs:/ {print $2; exit}' /etc/apt/sources.list.d/debian.sources)
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror trixie main" >"$work/trixie.list"
cat >"$work/apt.conf" <<CONF
Dir::Etc::sourcelist "$work/trixie.list";
Dir::Etc::sourceparts "-";
Dir::Etc::preferencesparts "-";
Dir::State::lists "$work/lists";
Dir::State::status "$work/status";
Dir::Cache "$work/cache";
APT::Sandbox::User "root";
CONF
cd "$work"
export APT_CONFIG=$work/apt.conf
apt-get update -qq
apt-get download -qq docker-compose docker-buildx
for package in *.deb; do dpkg-deb --extract "$package" unpacked; done
cp unpacked/usr/libexec/docker/cli-plugins/* "$target/cli-plugins/"

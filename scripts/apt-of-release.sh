#!/usr/bin/env bash
# apt-of-release.sh DIRECTORY RELEASE KIND…: an apt of its own in DIRECTORY, for packages of another release of Debian. KIND is deb or
# deb-src. It knows no package as installed and installs none: APT_CONFIG=DIRECTORY/apt.conf apt-get download, source.
set -euo pipefail
directory=$1 release=$2
mkdir -p "$directory"/lists/partial "$directory"/cache/archives/partial
chmod 755 "$directory"
touch "$directory/status"
mirror=$(awk '/^URIs:/ {print $2; exit}' /etc/apt/sources.list.d/debian.sources)
for kind in "${@:3}"; do
    echo "$kind [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $release main"
done >"$directory/$release.list"
cat >"$directory/apt.conf" <<CONF
Dir::Etc::sourcelist "$directory/$release.list";
Dir::Etc::sourceparts "-";
Dir::Etc::preferencesparts "-";
Dir::State::lists "$directory/lists";
Dir::State::status "$directory/status";
Dir::Cache "$directory/cache";
APT::Sandbox::User "root";
CONF
APT_CONFIG=$directory/apt.conf apt-get update -qq

#!/usr/bin/env bash
# Copies what docker-compose.yml keeps into a new directory, while runs go on:
#
#   deploy/backup.sh DIRECTORY
#
# The database comes first, then the files of the object store, so that no row names what the copy lacks. The store stands still while its
# files are copied: training goes on, saves and events wait. deploy/restore.sh DIRECTORY brings the copy back.
# The copy holds specs, logs and weights: it is for its owner alone. Keep a copy of deploy/secrets elsewhere.
set -euo pipefail
[ $# = 1 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
umask 077
[ ! -e "$1" ] || { echo "$1 already exists; a backup never overwrites anything. Choose a new directory" >&2; exit 1; }
draft=$1.partial
mkdir -p "$draft"
draft=$(realpath "$draft")
target=$(dirname "$draft")/$(basename "$1")
cd "$(dirname "$0")/.."

for part in database object-store; do
    if [ -z "$(docker compose ps --quiet --status running "$part")" ]; then
        echo "$part does not run here. Start it by docker compose up --detach, or, if you have your own, back that up by its own means" >&2
        exit 1
    fi
done
echo "==> copying the database"
docker compose exec -T database pg_dump --username=everstep --format=custom --no-owner everstep >"$draft/everstep.dump"
echo "==> copying the object store"
trap 'docker compose start object-store >/dev/null' EXIT
docker compose stop object-store
docker compose run --rm --no-deps -T --user 10001:10001 prepare \
    tar --create --directory=/data --exclude=./lost+found . >"$draft/objects.tar"
(cd "$draft" && sha256sum everstep.dump objects.tar >SHA256SUMS)
sync "$draft"/*
mv "$draft" "$target"
echo "$target: $(du -sh "$target" | cut -f1)"

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
fail() { echo "$*" >&2; exit 1; }
target=$(realpath --canonicalize-missing "$1")
draft=$target.partial
cd "$(dirname "$0")/.."

[ ! -e "$target" ] || fail "$1 already exists; a backup never overwrites anything. Choose a new directory"
for part in database object-store; do
    [ -n "$(docker compose ps --quiet --status running "$part")" ] ||
        fail "$part does not run here. Start it by docker compose up --detach, or, if you have your own, back that up by its own means"
done
mkdir -p "$(dirname "$target")"
mkdir "$draft" || fail "another backup is writing $draft, or was killed; if none runs, remove it"
stopped=
finish() {
    [ -z "$stopped" ] || docker compose start object-store >/dev/null ||
        echo "the object store stands still; start it: docker compose start object-store" >&2
    rm -rf "$draft"
}
trap finish EXIT
echo "==> copying the database"
docker compose exec -T database pg_dump --username=everstep --format=custom --no-owner everstep >"$draft/everstep.dump"
echo "==> copying the object store"
stopped=yes
docker compose stop object-store
docker compose run --rm --no-deps -T --user 10001:10001 prepare \
    tar --create --directory=/data --exclude=./lost+found . >"$draft/objects.tar"
docker compose start object-store >/dev/null
stopped=
(cd "$draft" && sha256sum everstep.dump objects.tar >SHA256SUMS)
sync "$draft"/*
mv --no-target-directory "$draft" "$target"
echo "$target: $(du -sh "$target" | cut -f1)"

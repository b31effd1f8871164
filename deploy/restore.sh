#!/usr/bin/env bash
# Brings a copy made by deploy/backup.sh into a new deployment, whose volumes are empty:
#
#   deploy/restore.sh DIRECTORY
#   docker compose up --detach --scale worker=3
#
# Stop the old deployment first: two on copies of one storage do not know of each other. Runs that were live are submitted again, and
# resume from the newest checkpoint in the copy. API tokens of the copy stay valid, but the local administrators' tokens are new.
set -euo pipefail
[ $# = 1 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
source=$(realpath "$1")
cd "$(dirname "$0")/.."
elsewhere="restore into a new deployment (another COMPOSE_PROJECT_NAME), or remove it by docker compose down --volumes"
fail() { echo "$*" >&2; exit 1; }
in_volume() { docker compose run --rm --no-deps -T --user 10001:10001 prepare "$@"; }
query() { docker compose exec -T database psql --username=everstep --dbname=everstep --tuples-only --no-align --command "$1"; }

(cd "$source" && sha256sum --check --quiet SHA256SUMS) || fail "$source is damaged or not a backup; use another one"
# Each answer has a line of its own: a command that fails in [ ] would count as an empty answer.
running=$(docker compose ps --quiet)
[ -z "$running" ] || fail "parts of the deployment run here; stop them first: docker compose down"
docker compose run --rm --no-deps -T prepare
held=$(in_volume find /data -mindepth 1 -name lost+found -prune -o -print -quit)
[ -z "$held" ] || fail "the volume of the object store is not empty; $elsewhere"
docker compose up --detach --wait --no-deps database
tables=$(query "SELECT count(*) FROM information_schema.tables WHERE table_schema = 'public'")
[ "$tables" = 0 ] || fail "the database has tables already; $elsewhere"
trap 'echo "the restore has not finished; do not start this deployment. Remove it by docker compose down --volumes, and try again" >&2' EXIT
echo "==> restoring the database"
docker compose exec -T database pg_restore --username=everstep --dbname=everstep --no-owner --single-transaction <"$source/everstep.dump"
# The store is copied after the database, and may be of a later start of a service: without this the database would count as its older copy.
query "UPDATE storage_identity SET generation = generation + 1000" >/dev/null
echo "==> restoring the object store"
in_volume tar --extract --directory=/data --no-overwrite-dir <"$source/objects.tar"
docker compose up --detach --wait service-a
# The database was copied first: the store's copy may have submissions that began in between.
docker compose exec -T service-a everstep storage adopt
trap - EXIT
echo "restored; go on with: docker compose up --detach --scale worker=N"

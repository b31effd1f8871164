#!/usr/bin/env bash
# Brings a copy made by deploy/backup.sh into a new deployment, or into a new database and storage:
#
#   deploy/restore.sh DIRECTORY                       then: docker compose up --detach --scale worker=3
#   deploy/restore.sh DIRECTORY DATABASE [STORAGE]    then: everstep serve with both, and everstep storage --adopt
#
# Stop the old service first: two on copies of one storage do not know of each other. Runs that were live are submitted again, and resume
# from the newest checkpoint in the copy. API tokens of the copy stay valid, but the local administrators' tokens are new.
set -euo pipefail
[ $# -ge 1 ] && [ $# -le 3 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
umask 077
source=$(realpath "$1")
fail() { echo "$*" >&2; exit 1; }
(cd "$source" && sha256sum --check --quiet SHA256SUMS) || fail "$source is damaged or not a backup; use another one"
# The storage is copied after the database, and may be of a later start of a service: without this the database would count as its older copy.
newest="UPDATE storage_identity SET generation = generation + 1000"

# ---------------------------------------------------------------- the deployment of docker-compose.yml

in_volume() { docker compose run --rm --no-deps -T --user 10001:10001 prepare "$@"; }
query() { docker compose exec -T database psql --username=everstep --dbname=everstep --tuples-only --no-align --command "$1"; }
restore_deployment() {
    cd "$(dirname "$0")/.."
    local elsewhere running held tables
    elsewhere="restore into a new deployment (another COMPOSE_PROJECT_NAME), or remove it by docker compose down --volumes"
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
    query "$newest" >/dev/null
    echo "==> restoring the object store"
    in_volume tar --extract --directory=/data --no-overwrite-dir <"$source/objects.tar"
    docker compose up --detach --wait service-a
    # Rows may be behind what the store holds of their runs.
    docker compose exec -T service-a everstep storage --adopt
    trap - EXIT
    echo "restored; go on with: docker compose up --detach --scale worker=N"
}

# ---------------------------------------------------------------- another service

restore_service() {
    local database=${1/+psycopg/} storage=${2:-} tables
    if [ -n "$storage" ]; then
        [ -d "$source/storage" ] || fail "$source has no storage; leave out $storage, or use another backup"
        [ ! -e "$storage" ] || [ -z "$(ls -A "$storage")" ] || fail "the storage $storage is not empty; move it away, or restore to another directory"
    fi
    case $database in
        postgresql*)
            [ -e "$source/everstep.dump" ] || fail "$source has a SQLite database; give a file, not $database"
            tables=$(psql --no-align --tuples-only --dbname="$database" \
                --command="SELECT count(*) FROM information_schema.tables WHERE table_schema = 'public'")
            [ "$tables" = 0 ] || fail "the database has tables already; restore into an empty one" ;;
        *)
            [ -e "$source/everstep.db" ] || fail "$source has a PostgreSQL database; give the URL of an empty one, not $database"
            for file in "$database"*; do [ ! -e "$file" ] || fail "$file already exists; move it away, with all files that begin so"; done
            mkdir -p "$(dirname "$database")" ;;
    esac
    trap 'echo "the restore has not finished; start no service there. Empty both, and try again" >&2' EXIT
    if [ -n "$storage" ]; then
        echo "==> restoring the storage"
        mkdir -p "$storage"
        cp --archive --no-target-directory "$source/storage" "$storage"
    fi
    echo "==> restoring the database"
    case $database in
        postgresql*)
            pg_restore --no-owner --single-transaction --dbname="$database" "$source/everstep.dump"
            [ -z "$storage" ] || psql --quiet --dbname="$database" --command="$newest" ;;
        *)
            cp "$source/everstep.db" "$database.partial"
            [ -z "$storage" ] || python3 -c 'import sqlite3, sys; sqlite3.connect(sys.argv[1], isolation_level=None).execute(sys.argv[2])' \
                "$database.partial" "$newest"
            sync "$database.partial"
            mv --no-clobber "$database.partial" "$database" ;;
    esac
    trap - EXIT
    echo "restored; start everstep serve with this database and storage, then run: everstep storage --adopt"
}

if [ $# = 1 ]; then restore_deployment; else restore_service "${@:2}"; fi

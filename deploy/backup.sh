#!/usr/bin/env bash
# Copies a service's database and storage into a new directory, while runs go on:
#
#   deploy/backup.sh DIRECTORY                       what docker-compose.yml keeps
#   deploy/backup.sh DIRECTORY DATABASE [STORAGE]    another service's: its SQLite file or PostgreSQL's URL, and its storage's directory
#
# Leave out STORAGE where it is an object store: enable versioning or replication of its bucket. Leave the password out of the URL, and set
# PGPASSWORD or ~/.pgpass. deploy/restore.sh brings the copy back. The copy holds specs, logs and weights: it is for its owner alone. Keep a
# copy of the secrets elsewhere.
set -euo pipefail
[ $# -ge 1 ] && [ $# -le 3 ] || { sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2; }
umask 077
export LC_ALL=C
fail() { echo "$*" >&2; exit 1; }
target=$(realpath --canonicalize-missing "$1")
draft=$target.partial
database=${2:-} storage=
[ $# -lt 3 ] || storage=$(realpath "$3")
stopped=
finish() {
    [ -z "$stopped" ] || docker compose start object-store >/dev/null ||
        echo "the object store stands still; start it: docker compose start object-store" >&2
    rm -rf "$draft"
}

# ---------------------------------------------------------------- the deployment of docker-compose.yml

# The object store stands still while the database and then its files are copied, so that no row names what the copy lacks. Training goes on;
# saves and events wait.
copy_deployment() {
    stopped=yes
    docker compose stop object-store
    echo "==> copying the database"
    docker compose exec -T database pg_dump --username=everstep --format=custom --no-owner everstep >"$draft/everstep.dump"
    echo "==> copying the object store"
    docker compose run --rm --no-deps -T --user 10001:10001 prepare \
        tar --create --directory=/data --exclude=./lost+found . >"$draft/objects.tar"
    docker compose start object-store >/dev/null
    stopped=
}

# ---------------------------------------------------------------- another service

# Nothing stands still. Each part may say only what is copied after it: a row what journals say, a journal which checkpoints there are, a
# manifest which files. Retention deletes meanwhile, a manifest first. So everything is copied once before, the database next, and then run
# by run its journal and what is new, again where the journal names a checkpoint that was deleted before its turn.
copy_service() {
    local began run
    began=$(($(date +%s) - 60))
    if [ -n "$storage" ]; then
        echo "==> copying the storage"
        mkdir "$draft/storage"
        listed . -path './runs/*/events/*' -type f | pack_listed | unpack
        copy_files .
    fi
    echo "==> copying the database${storage:+, and what is new in the storage}"
    copy_database
    [ -n "$storage" ] || return 0
    copy_files . --newer="@$began" --exclude='./runs/*'
    listed ./runs -mindepth 1 -newermt "@$began" | tr '\0\n' '\n ' | cut -d / -f 3 | sort -u >"$draft/changed"
    while read -r run; do copy_run "./runs/$run" --newer="@$began"; done <"$draft/changed"
    rm "$draft/changed"
    # What else users' code has put there leads anywhere, or stops whoever reads it.
    find "$draft/storage" ! -type f ! -type d -printf 'left out, no regular file: %P\n' -delete >&2
}

copy_run() {
    local missing deadline=$((SECONDS + 60))
    [ -d "$storage/$1" ] || return 0
    while :; do
        listed "$1/events" -type f | pack_listed | unpack
        copy_files "$@"
        missing=$(missing_checkpoints "$draft/storage/$1")
        [ -n "$missing" ] && [ "$SECONDS" -lt "$deadline" ] || break
        sleep 0.5 # a journal may say a while later that a checkpoint was deleted
    done
    [ -z "$missing" ] || echo "the storage lacks checkpoints that the journal of $1 names:" $missing >&2
}

copy_database() {
    rm -f "$draft"/everstep.*
    case $database in
        postgresql*) pg_dump --format=custom --no-owner --file="$draft/everstep.dump" --dbname="${database/+psycopg/}" ;;
        *) python3 - "$database" "$draft/everstep.db" <<'PYTHON' ;;
import contextlib, pathlib, sqlite3, sys
source = pathlib.Path(sys.argv[1]).absolute().as_uri() + "?mode=ro"
with contextlib.closing(sqlite3.connect(source, uri=True)) as reader, contextlib.closing(sqlite3.connect(sys.argv[2])) as writer:
    reader.backup(writer)
    writer.execute("PRAGMA journal_mode=DELETE")
    if (answer := writer.execute("PRAGMA integrity_check").fetchone()[0]) != "ok":
        sys.exit(f"{sys.argv[1]} is damaged: {answer}")
PYTHON
    esac
}

# All but journals, and then the manifests that were there before: copy_files DIRECTORY [OPTION…]
copy_files() {
    listed "$1" -path './runs/*/checkpoints/*/manifest.json' -type f >"$draft/manifests"
    pack --anchored --no-wildcards-match-slash --exclude='./runs/*/events' --exclude='./runs/*/checkpoints/*/manifest.json' \
        "${@:2}" --no-anchored --exclude='.[!/]*' "$1" | unpack
    pack_listed <"$draft/manifests" | unpack
    rm "$draft/manifests"
}
pack_listed() { pack --null --no-recursion --files-from=-; }
listed() (cd "$storage" && though_files_change find "$@" ! -name '.?*' -print0)
pack() { though_files_change tar --create --sparse --directory="$storage" "$@"; } # follows no link
unpack() { tar --extract --directory="$draft/storage"; }

# Run a program, and end where it says anything else than that files change and vanish.
though_files_change() {
    local said status=0
    said=$("$@" 2>&1 >&3) || status=$?
    grep ': Permission denied$' <<<"$said" | sed 's/^/left out: /' >&2 || true
    said=$(grep -v -e ': No such file or directory$' -e ': file changed as we read it$' -e ': File removed before we read it$' \
        -e ': File shrank by .*' -e ': socket ignored$' -e ': Exiting with failure status due to previous errors$' -e ': Permission denied$' <<<"$said") || true
    [ -z "$said" ] || fail "the storage cannot be copied: $said"
    [ "$status" -le 2 ] || fail "the storage cannot be copied: $1 ended with $status"
} 3>&1

# Checkpoints that a run's copied journal says to be there, without a copy.
missing_checkpoints() {
    local name
    comm -23 <(checkpoints "$1" committed) <(checkpoints "$1" '\(deleted\|corrupt\)') | while read -r name; do
        [ -e "$1/checkpoints/$name/manifest.json" ] || echo "$name"
    done
}
checkpoints() { grep -hs "\"kind\":\"checkpoint_$2\"" "$1"/events/* | grep -o '"name":"step-[^"/]*"' | cut -d '"' -f 4 | sort -u || true; }

# ----------------------------------------------------------------

[ ! -e "$target" ] || fail "$1 already exists; a backup never overwrites anything. Choose a new directory"
if [ $# = 1 ]; then
    cd "$(dirname "$0")/.."
    for part in database object-store; do
        [ -n "$(docker compose ps --quiet --status running "$part")" ] ||
            fail "$part does not run here. Start it by docker compose up --detach, or, if you have your own, back that up by its own means"
    done
else
    case $database in postgresql*) ;; *) [ -f "$database" ] || fail "$database: no SQLite file, nor a URL postgresql://… of a database" ;; esac
    for name in runs code cluster; do
        [ ! -L "${storage:-/none}/$name" ] || fail "$storage/$name is a link, which may lead anywhere; mount that directory there instead"
    done
fi
mkdir -p "$(dirname "$target")"
mkdir "$draft" || fail "another backup is writing $draft, or was killed; if none runs, remove it"
trap finish EXIT
if [ $# = 1 ]; then copy_deployment; else copy_service; fi
(cd "$draft" && shopt -s nullglob && sha256sum everstep.* objects.ta[r] >SHA256SUMS)
sync --file-system "$draft"
mv --no-target-directory "$draft" "$target"
echo "$target: $(du -sh "$target" | cut -f1)"

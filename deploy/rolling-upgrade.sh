#!/usr/bin/env bash
# Replaces what docker-compose.yml runs by what it says now (a new image, other settings), without an outage:
#
#   deploy/rolling-upgrade.sh service    both replicas of the service, one after the other; the other one answers meanwhile
#   deploy/rolling-upgrade.sh workers    every worker, one after the other: drained (its ranks save and move), stopped, replaced.
#                                        No run stops, and no step is lost; one worker less has room meanwhile
#   deploy/rolling-upgrade.sh all        all of it with the head, for new versions of Everstep, torch or Ray, which all nodes must
#                                        have in common: runs are paused with a checkpoint, parts replaced, those runs resumed
#
# Build the image first (docker compose build). PROFILE=gpu-worker replaces workers with GPUs.
set -euo pipefail
cd "$(dirname "$0")/.."
worker=${PROFILE:-worker}
deadline_s=${DRAIN_DEADLINE_S:-600}

compose() { docker compose "$@"; }
everstep() { compose exec -T service-a everstep "$@"; }
say() { printf '==> %s\n' "$*"; }

# address ID: of a container on the network of Ray's nodes
address() { docker inspect --format '{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}' "$1"; }
# node IP: the id of the live Ray node at that address; nothing where there is none
node() {
    everstep cluster --json | python3 -c '
import json, sys
nodes = [n["id"] for n in json.load(sys.stdin)["nodes"] if n["ip"] == sys.argv[1] and n["state"] not in ("DEAD",)]
print(nodes[-1] if nodes else "")' "$1"
}
# count: worker nodes that take ranks
count() { everstep cluster --json | python3 -c '
import json, sys
print(sum(n["state"] == "ALIVE" and not n["is_head"] for n in json.load(sys.stdin)["nodes"]))'; }
# until_count N
until_count() {
    for _ in $(seq 180); do
        [ "$(count)" -ge "$1" ] && return
        sleep 2
    done
    echo "the cluster has not got $1 workers back within 6 minutes; see: docker compose logs $worker" >&2
    exit 1
}

# ids STATUS…: of the runs with one of these statuses
ids() {
    everstep runs --limit 100000 --json | python3 -c '
import json, sys
for run in json.load(sys.stdin):
    if run["status"] in sys.argv[1:]:
        print(run["id"])' "$@"
}
# until_paused RUN: or ended
until_paused() {
    for _ in $(seq 150); do
        ids STARTING RUNNING RECOVERING STOPPING | grep -qx "$1" || return 0
        sleep 2
    done
    echo "run $1 has not paused within 5 minutes; see: everstep why $1" >&2
    exit 1
}

upgrade_service() {
    for replica in service-a service-b; do
        say "replacing $replica"
        compose up --detach --wait --no-deps --force-recreate "$replica"
    done
}

upgrade_workers() {
    local containers number before id
    mapfile -t containers < <(compose ps --quiet "$worker")
    number=${#containers[@]}
    before=$(count)
    for container in "${containers[@]}"; do
        id=$(node "$(address "$container")")
        if [ -n "$id" ]; then
            say "draining $id"
            everstep drain "$id" --deadline "$deadline_s" --reason "rolling upgrade" --wait
        fi
        docker stop "$container" >/dev/null
        docker rm --force "$container" >/dev/null
        compose up --detach --no-deps --no-recreate --scale "$worker=$number" "$worker"
        until_count "$before"
        say "replaced $container"
    done
}

upgrade_all() {
    local before runs
    before=$(count)
    mapfile -t runs < <(ids STARTING RUNNING RECOVERING)
    for run in "${runs[@]}"; do
        say "pausing $run"
        everstep pause "$run"
    done
    for run in "${runs[@]}"; do
        until_paused "$run"
    done
    upgrade_service
    compose up --detach --wait --no-deps --force-recreate head
    compose up --detach --no-deps --force-recreate --scale "$worker=$(compose ps --quiet "$worker" | wc -l)" "$worker"
    until_count "$before"
    for run in "${runs[@]}"; do
        say "resuming $run"
        everstep resume "$run"
    done
}

case ${1:-} in
service) upgrade_service ;;
workers) upgrade_workers ;;
all) upgrade_all ;;
*)
    sed -n '2,11s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac

#!/usr/bin/env bash
# Train one spec on several hosts by torchrun over ssh: the loop, data order and checkpoints of a run, without Ray or the service.
#
#   deploy/torchrun/launch.sh HOST1,HOST2,… SPEC.yaml [--storage /mnt/shared/everstep] [--run-id ID] [--set FIELD=VALUE] …
#
# Every host needs ssh without a password, this repository (or the installed package) and its environment under the same paths, and
# the training data; the first one is where ranks meet, and rank 0 there reads and writes the storage. Settings, by environment:
#   NPROC         ranks on each host; by default its GPUs, on a host without any its cores
#   PORT          where ranks meet on the first host (29500)
#   MAX_RESTARTS  how often torchrun starts the ranks again after a failure (3)
#   PYTHON        interpreter on every host (.venv/bin/python of this directory)
#   IFACE         network interface for gloo and NCCL, where the default one is wrong (for example eth0)
#
# Ctrl-C asks all ranks to save at one step and leave; the same command again goes on from there.
set -euo pipefail

if [ $# -lt 2 ]; then
    sed -n '2,16s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
IFS=, read -r -a hosts <<<"$1"
shift
port=${PORT:-29500}
python=${PYTHON:-$PWD/.venv/bin/python}
launch="$(date +%s)-$$" # agents of another launch on the same port are told apart by it

pids=()
stop() { # each ssh has a terminal, so that its end reaches torchrun as SIGHUP, which passes SIGTERM on to its ranks
    trap - INT TERM
    kill -TERM "${pids[@]}" 2>/dev/null || true
}
trap stop INT TERM

for node in "${!hosts[@]}"; do
    # Without it ranks that are started again may read where those before them met, and look for them there.
    # Sets are listed in one order by all ranks.
    command=(env "PYTHONUNBUFFERED=1" "PYTHONHASHSEED=0" "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")
    [ -z "${IFACE:-}" ] || command+=("GLOO_SOCKET_IFNAME=$IFACE" "NCCL_SOCKET_IFNAME=$IFACE")
    command+=("$python" -m torch.distributed.run
        --nnodes "${#hosts[@]}" --node-rank "$node" --nproc-per-node "${NPROC:-auto}" --max-restarts "${MAX_RESTARTS:-3}"
        --rdzv-backend c10d --rdzv-endpoint "${hosts[0]}:$port" --rdzv-id "$launch"
        -m train_fn.standalone "$@")
    ssh -tt -o BatchMode=yes "${hosts[$node]}" "cd $(printf %q "$PWD") && exec $(printf '%q ' "${command[@]}")" </dev/null \
        > >(sed -u "s/^/${hosts[$node]}: /") 2>&1 &
    pids+=($!)
done

code=0
for pid in "${pids[@]}"; do
    wait "$pid" || code=$?
done
exit "$code"

#!/usr/bin/env bash
# NATS for the sidecars of one job, around whatever runs in it:
#
#   sbatch --nodes=4 nats.sh sidecar.sh python train.py ...
#
# Three servers on the first three nodes, one where there are fewer. They end with the job. What they
# keep is in RUNS on those nodes: a job that is requeued onto the same nodes goes on with it. A NATS
# that outlives jobs needs none of this: name it in the configuration, or in
# SMARTSEARCH_SIDECAR__CLUSTER__NATS_URL.
set -euo pipefail

: "${RUNS:?a folder on the own disk of each node}"
: "${SLURM_JOB_ID:?this is a batch script: start it with sbatch}"
: "${SLURM_JOB_NODELIST:?this is a batch script: start it with sbatch}"
NATS_SERVER=${NATS_SERVER:-nats-server}
NATS_PORT=${NATS_PORT:-4222}
NATS_ROUTE_PORT=${NATS_ROUTE_PORT:-6222}
NATS_MONITOR_PORT=${NATS_MONITOR_PORT:-8222}
NATS_SECONDS=${NATS_SECONDS:-60}
export NATS_SERVER NATS_PORT NATS_ROUTE_PORT NATS_MONITOR_PORT
export NATS_STORE="$RUNS/$SLURM_JOB_ID.nats"

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
if ((${#hosts[@]} >= 3)); then hosts=("${hosts[@]:0:3}"); else hosts=("${hosts[0]}"); fi

# Who can write to it can end the run. Passwords travel in the environment of this user's own tasks; a
# letter in front, as the server reads one of digits as a number.
secret() { printf p && od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }
NATS_PASSWORD=$(secret)
NATS_ROUTE_PASSWORD=$(secret)
export NATS_PASSWORD NATS_ROUTE_PASSWORD
NATS_ROUTES=
urls=
for host in "${hosts[@]}"; do
    NATS_ROUTES+=", nats://route:$NATS_ROUTE_PASSWORD@$host:$NATS_ROUTE_PORT"
    urls+=",nats://sidecar:$NATS_PASSWORD@$host:$NATS_PORT"
done
export NATS_ROUTES

# One task a node; it writes its configuration where only this user reads it.
# shellcheck disable=SC2016 # expanded on the node
serve='
set -euo pipefail
umask 077
mkdir -p "$NATS_STORE"
: "${NATS_LISTEN:=0.0.0.0}" # all addresses of the node, unless its environment names one
cluster=
if (($1 > 1)); then
    cluster="cluster {
        name: smartsearch, listen: \"$NATS_LISTEN:$NATS_ROUTE_PORT\"
        authorization { user: route, password: $NATS_ROUTE_PASSWORD }
        routes: [${NATS_ROUTES#, }]
    }"
fi
cat >"$NATS_STORE/$SLURMD_NODENAME.conf" <<CONF
server_name: "$SLURMD_NODENAME"
listen: "$NATS_LISTEN:$NATS_PORT"
http: "$NATS_LISTEN:$NATS_MONITOR_PORT"
# On the disk before it is acknowledged: a lease or a latch outlives a power cut.
jetstream { store_dir: "$NATS_STORE/$SLURMD_NODENAME", sync_interval: always }
authorization { users: [{ user: sidecar, password: $NATS_PASSWORD }] }
$cluster
CONF
exec "$NATS_SERVER" --config "$NATS_STORE/$SLURMD_NODENAME.conf"
'
nodelist=$(IFS=, && echo "${hosts[*]}")
srun --overlap --nodes="${#hosts[@]}" --nodelist="$nodelist" --ntasks-per-node=1 \
    --kill-on-bad-exit=0 bash -c "$serve" nats "${#hosts[@]}" &
servers=$!

inside=
# shellcheck disable=SC2329 # called by the traps
stop() {
    trap - EXIT TERM INT
    if [[ -n $inside ]]; then
        kill -TERM "$inside" 2>/dev/null || true
        # Before the servers: a sidecar that ends in order says so to the others.
        wait "$inside" || true
    fi
    kill -TERM "$servers" 2>/dev/null || true
    wait "$servers" || true
}
trap stop EXIT
trap 'exit 143' TERM INT

healthy() {
    exec 3<>"/dev/tcp/$1/$NATS_MONITOR_PORT" || return 1
    printf 'GET /healthz HTTP/1.0\r\n\r\n' >&3
    grep -q '"ok"' <&3
}
until=$((SECONDS + NATS_SECONDS))
for host in "${hosts[@]}"; do
    until (healthy "$host") 2>/dev/null; do
        if ((SECONDS > until)) || ! kill -0 "$servers" 2>/dev/null; then
            echo "NATS did not become healthy on $host: see its lines above" >&2
            exit 1
        fi
        sleep 0.2
    done
done

export SMARTSEARCH_SIDECAR__CLUSTER__NATS_URL=${urls#,}
unset NATS_PASSWORD NATS_ROUTE_PASSWORD NATS_ROUTES
status=0
"$@" &
inside=$!
wait "$inside" || status=$?
inside=
exit "$status"

#!/usr/bin/env bash
# A sidecar beside each node of a Slurm job, the trainer, and the gate at the end.
#
#   SIDECAR_CONFIG=/etc/smartsearch/sidecar.toml RUNS=/local/runs sbatch sidecar.sh python train.py ...
#
# RUNS is a folder of each node, best on a local disk: the ledger syncs before every answer. On more
# than one node the configuration names the port and the execute capability, the same everywhere,
# because one sandbox_url serves them all.
#
# Where the configuration has [cluster], or the environment its NATS servers (nats.sh starts some), the
# nodes are one run: its id is the job's, each node's name is its own, and the gate asks for all.
#
#SBATCH --job-name=smartsearch
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
# Time to drain before the job is killed.
#SBATCH --signal=B:TERM@120
set -euo pipefail

: "${SIDECAR_CONFIG:?the configuration of the sidecar}"
: "${RUNS:?a folder for the ledgers on each node}"
: "${SLURM_JOB_ID:?this is a batch script: start it with sbatch}"
SIDECAR=${SIDECAR:-smartsearch-sidecar}
READY_SECONDS=${READY_SECONDS:-3600} # a large index is verified in full before it is served
run="$RUNS/$SLURM_JOB_ID"

# Beside whatever else runs in the job: one task a node, sharing its CPUs. An array, not a function:
# in the background, a signal must reach srun itself, which hands it on to its tasks.
on_every_node=(srun --overlap --nodes="${SLURM_JOB_NUM_NODES:-1}" --ntasks-per-node=1
    --kill-on-bad-exit=0)

# A requeued job has the same id, and a node that finds its directory again is the same node.
coordinated=()
if [[ -n ${SMARTSEARCH_SIDECAR__CLUSTER__NATS_URL:-} ]] || grep -q '^\[cluster\]' "$SIDECAR_CONFIG"; then
    export SMARTSEARCH_SIDECAR__CLUSTER__RUN_ID="slurm-$SLURM_JOB_ID"
    export SMARTSEARCH_SIDECAR__RUN__NODES="${SLURM_JOB_NUM_NODES:-1}"
    # shellcheck disable=SC2016 # expanded on the node
    coordinated=(bash -c 'node=${SLURMD_NODENAME:-$(hostname -s)}
        export SMARTSEARCH_SIDECAR__CLUSTER__NODE=${node//[^A-Za-z0-9_-]/-}
        exec "$@"' one-of-the-run)
fi

# A job that was requeued finds its directory. Where its trainer of the time before ended while the
# sidecars were up, no trainer was at work since, and they are told so: this one begins below. A trainer
# that outlived them, as when all of a job is killed, has left this file.
training="$run.training"
stopped=(--trainer-stopped)
if [[ -e $training ]]; then stopped=(); fi

# What says ready must be of this time.
"${on_every_node[@]}" rm -f "$run/endpoints.json"
"${on_every_node[@]}" "${coordinated[@]}" \
    "$SIDECAR" serve --config "$SIDECAR_CONFIG" --run-dir "$run" --resume "${stopped[@]}" &
sidecars=$!

trainer=
trainer_ended() { # before its sidecars, if these are up
    trainer=
    if kill -0 "$sidecars" 2>/dev/null; then rm -f "$training"; fi
}
# shellcheck disable=SC2329 # called by the traps
stop() {
    trap - EXIT TERM INT
    if [[ -n $trainer ]]; then
        kill -TERM "$trainer" 2>/dev/null || true
        # What it asks at its end must not be refused.
        if timeout 60 tail --pid="$trainer" -f /dev/null; then trainer_ended; fi
    fi
    kill -TERM "$sidecars" 2>/dev/null || true
    # 4: a latch is closed, which the gate below has told already.
    wait "$sidecars" || true
}
trap stop EXIT
trap 'exit 143' TERM INT

# Ready once endpoints.json is there, on every node; a sidecar that could not begin ends the wait.
# shellcheck disable=SC2016 # expanded on the node
"${on_every_node[@]}" timeout "$READY_SECONDS" bash -c 'until [[ -e $1 ]]; do sleep 0.2; done' \
    wait-until-ready "$run/endpoints.json" &
waiting=$!
wait -n -p ended "$waiting" "$sidecars" || true
if [[ $ended != "$waiting" ]] || ! "${on_every_node[@]}" test -e "$run/endpoints.json"; then
    kill -TERM "$waiting" 2>/dev/null || true
    echo "a sidecar did not become ready: see its lines above" >&2
    exit 1
fi

# The internal URL travels in this file (0600) alone. The pinned client obeys proxy variables.
export SMARTSEARCH_SIDECAR_ENDPOINTS="$run/endpoints.json"
export NO_PROXY="127.0.0.1,localhost${NO_PROXY:+,$NO_PROXY}"
export no_proxy="$NO_PROXY"

status=0
mkdir -p "$RUNS"
touch "$training"
"$@" &
trainer=$!
wait "$trainer" || status=$?
trainer_ended

# The gate: a run that failed anywhere has no good checkpoint after its last receipt.
if ! "${on_every_node[@]}" "$SIDECAR" check --run-dir "$run" --settle 30; then
    echo "the run is not healthy: keep no checkpoint after the last accepted one" >&2
    if ((status == 0)); then status=1; fi
fi
exit "$status"

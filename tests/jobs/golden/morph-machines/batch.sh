#!/usr/bin/env bash
# Run plain-20260102-030405, written by vjob 0.1.0. Change conf.yaml and submit again rather than this file.
# shellcheck disable=SC2016 # values are quoted so that nothing in them expands
set -euo pipefail

# A warning may come before there is anybody to tell, and without a trap it would end this script.
early=
for name in USR1 USR2; do
  # shellcheck disable=SC2064 # the name is meant to expand now
  trap "early=\"\$early $name\"" "$name"
done

run=/home/u/exp/log/plain-20260102-030405
group=''
session=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
export VJOB_RUN=$run VJOB_GROUP=$group VJOB_SESSION=$session

python=
for candidate in /opt/vjob/bin/python python3; do
  if command -v "$candidate" >/dev/null; then python=$candidate; break; fi
done
[ -n "$python" ] || { echo "vjob: no python3 on $(hostname); install one (3.8 or later)" >&2; exit 112; }
agent() { "$python" /home/u/exp/log/plain-20260102-030405/agent.pyz "$@"; }

step=(
  --export=ALL         # this script's own environment, which sbatch got cleaned
  --input=/dev/null    # a rank that reads standard input must not hang
  --unbuffered         # lines of the preflight table as they come
  --cpu-bind=none      # ranks of a node share its CPUs; the agent sets OMP_NUM_THREADS
  --kill-on-bad-exit=0 # the run goes on without a lost rank
  --no-kill            # nor does a lost node end the step
  --wait=0
  --ntasks-per-node=1  # one agent a node; it starts the ranks
)
# all
node_0=(
  --nodes=4
  bash /home/u/exp/log/plain-20260102-030405/node.sh
)

step_pids=()
srun "${step[@]}" "${node_0[@]}" &
step_pids+=($!)

# One manager owns the run: it starts the ranks again on the nodes that are there. Where it is killed
# it goes on from its state in the run folder; `calls` are the signals that it may not have heard.
manager=
calls=
# shellcheck disable=SC2317 # the traps below call it
call_manager() {
  calls="$calls $1"
  [ -z "$manager" ] || kill -"$1" "$manager" 2>/dev/null || true
}
for name in TERM INT HUP USR1 USR2; do
  # shellcheck disable=SC2064 # the name is meant to expand now
  trap "call_manager $name" "$name"
done
calls="$early$calls"
failures=0
while [ "$failures" -lt 10 ]; do
  begun=$SECONDS
  # Not through `agent`: a function in the background is a shell of its own, which would die alone.
  "$python" /home/u/exp/log/plain-20260102-030405/agent.pyz morph manage --run "$run" --session "$session" --heard "$calls" \
    --expected "$SLURM_JOB_NUM_NODES" &
  manager=$!
  while kill -0 "$manager" 2>/dev/null; do
    wait "$manager" || true
  done
  status=0
  wait "$manager" || status=$?
  [ "$status" -ne 0 ] || break
  # Failures in a row end the job, not those of its whole life.
  [ $((SECONDS - begun)) -lt 60 ] || failures=0
  failures=$((failures + 1))
  echo "vjob: manager ended with $status ($failures in a row)" >&2 || true # a full disk
  sleep "$failures"
done

# A later start of the job owns the run, and its nodes and jobs are none of ours. Its step has the
# number of ours: srun would cancel that one if it were asked to end, and so would its own child
# once srun is gone (seen with 22.05). So both are killed, the child first.
answer=$(agent morph answer --run "$run" --session "$session" | tail -n 1)
if [ "$answer" = replaced ]; then
  for pid in "${step_pids[@]}"; do
    children=$(cat "/proc/$pid/task/$pid/children" 2>/dev/null) || continue
    # shellcheck disable=SC2086 # they are several
    kill -KILL $children "$pid" 2>/dev/null || true
  done
  exit 0
fi
# Nodes that did not go home by themselves; then what the manager said.
# srun may wait for a node that is gone: not we for srun.
kill -TERM "${step_pids[@]}" 2>/dev/null || true
for second in $(seq 50); do
  kill -0 "${step_pids[@]}" 2>/dev/null || break
  [ "$second" -lt 50 ] || kill -KILL "${step_pids[@]}" 2>/dev/null || true
  sleep 1
done
answer=$(agent morph answer --run "$run" --session "$session" | tail -n 1)
[ "$answer" != replaced ] || exit 0
if [ "$answer" = requeue ]; then
  scontrol requeue "$SLURM_JOB_ID" || exit 113
  exit 0
fi
# Jobs of the run that have yet to begin have nothing to join any more.
for job in $(agent morph others --run "$run" --session "$session" || true); do
  scancel --state=PENDING "$job" 2>/dev/null || true
done
exit "${answer:-1}"

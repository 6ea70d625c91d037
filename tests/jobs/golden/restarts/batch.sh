#!/usr/bin/env bash
# Run plain-20260102-030405, written by vjob 0.1.0. Change conf.yaml and submit again rather than this file.
#SBATCH --job-name=gpt2-xl
#SBATCH --comment=vjob:plain-20260102-030405
#SBATCH --output=scheduler.out
#SBATCH --open-mode=append
#SBATCH --time=120
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
#SBATCH --reservation="week 7"
#SBATCH --partition=gpu1
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:a100:4
#SBATCH --exclude=n7,n8
#SBATCH hetjob
#SBATCH --partition=gpu2
#SBATCH --nodes=7
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=14
#SBATCH --gres=gpu:a10:4
#SBATCH --exclude=n7,n8
#SBATCH --constraint=ib
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
# The tasks of an array share the number that users know; each has a SLURM_JOB_ID besides.
job_id=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}}
job_id=${job_id:-$SLURM_JOB_ID}
export VJOB_RUN=$run VJOB_GROUP=$group

python=
for candidate in /opt/vjob/bin/python python3; do
  if command -v "$candidate" >/dev/null; then python=$candidate; break; fi
done
[ -n "$python" ] || { echo "vjob: no python3 on $(hostname); install one (3.8 or later)" >&2; exit 112; }
agent() { "$python" /home/u/exp/log/plain-20260102-030405/agent.pyz "$@"; }

warned=
# Ends this script where its job goes back into the queue: the agent decides.
come_again() { # what close said; the signal that ended us, if any; 1 after a warning
  local way
  way=$(agent way --said "$1" --ended "$2" --warned "$3" --job-id "$SLURM_JOB_ID" \
    --restarts "${SLURM_RESTART_COUNT:-0}" --run "$run" | tail -n 1) || way=
  case $way in
    requeue) scontrol requeue "$SLURM_JOB_ID" || exit 113 ;;
    leave) ;;
    ended) exit 143 ;;
    *) return 0 ;;
  esac
  exit 0
}

step=(
  --export=ALL         # this script's own environment, which sbatch got cleaned
  --input=/dev/null    # a rank that reads standard input must not hang
  --unbuffered         # lines of the preflight table as they come
  --cpu-bind=none      # ranks of a node share its CPUs; the agent sets OMP_NUM_THREADS
  --kill-on-bad-exit=1 # a fixed world cannot go on without a rank
  --wait=600 # seconds that the last node may end after the first; 0 is no limit
  --ntasks-per-node=1  # one agent a node; it starts the ranks
)
# master
node_0=(
  --het-group=0
  --nodes=1
  bash /home/u/exp/log/plain-20260102-030405/node.sh
)
# slave
node_1=(
  --het-group=1
  --nodes=7
  --cpus-per-task=14 # srun does not take it from the job in 22.05 to 23.02
  bash /home/u/exp/log/plain-20260102-030405/node.sh
)

attempt=$(agent attempt --run "$run" --requeues "${SLURM_RESTART_COUNT:-0}")

# `called`: signals that told this job to end, or its ranks to save and leave. Then nothing is started
# again. srun passes the end on to every agent, and agents to every rank.
called=
ending=
step_pid=
# shellcheck disable=SC2317 # the traps below call it
end_step() {
  called="$called $1"
  ending=$1
  [ -z "$step_pid" ] || kill -"$1" "$step_pid" 2>/dev/null || true
}
for name in TERM INT HUP; do
  # shellcheck disable=SC2064 # the name is meant to expand now
  trap "end_step $name" "$name"
done
# A call to checkpoint goes through a file to each rank's own process: srun would reach the ranks'
# children too, and data loaders die of it.
calls=0
# shellcheck disable=SC2317 # the traps below call it
call_ranks() {
  [ "$1" != USR1 ] || warned=1
  [ "$1" != USR1 ] || called="$called $1"
  if [ -z "$step_pid" ]; then
    early="$early $1"
    return
  fi
  calls=$((calls + 1))
  agent signal --run "$run" --attempt "$attempt" --name "$1" --key "batch-$1-$calls" || true
}
trap 'call_ranks USR1' USR1
trap 'call_ranks USR2' USR2

while true; do
  export VJOB_ATTEMPT=$attempt
  # Makes attempt-N, picks the master's port on this host, publishes master.json.
  if ! agent open --run "$run" --attempt "$attempt" --group "$group" --job-id "$job_id"; then
    agent close --run "$run" --attempt "$attempt" --group "$group" --status 112 >/dev/null || true
    exit 112
  fi

  srun "${step[@]}" "${node_0[@]}" : "${step[@]}" "${node_1[@]}" &
  step_pid=$!
  # What came before there was a step.
  [ -z "$ending" ] || kill -"$ending" "$step_pid" 2>/dev/null || true
  for name in $early; do call_ranks "$name"; done
  early=

  # wait returns early at every trap; once srun is gone, it keeps its status for one more wait.
  while kill -0 "$step_pid" 2>/dev/null; do
    wait "$step_pid" || true
  done
  status=0
  wait "$step_pid" || status=$?
  step_pid=

  # srun's status hides the culprit (143 for a rank's 9): close reads the ranks' own exit files. It
  # prints the exit code, and for an attempt that is started again the next one and how long to wait.
  read -r code next wait_s <<<"$(agent close --run "$run" --attempt "$attempt" --group "$group" \
    --status "$status" --called "$called" --left $((7200 - SECONDS)) | tail -n 1)" || true
  come_again "$code" "$ending" "$warned"
  [ -n "${next:-}" ] || exit "${code:-1}"

  sleep "$wait_s" &
  sleep_pid=$!
  while [ -z "$called" ] && kill -0 "$sleep_pid" 2>/dev/null; do
    wait "$sleep_pid" || true
  done
  if [ -n "$called" ]; then
    kill "$sleep_pid" 2>/dev/null || true
    agent stop --run "$run" --attempt "$next" --kind cancel \
      --reason "told to end (${called# }) before attempt $next started; attempt $attempt had failed" || true
    come_again 143 "$ending" "$warned"
    exit 143
  fi
  attempt=$next
done

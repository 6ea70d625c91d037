#!/usr/bin/env bash
# Run plain-20260102-030405, written by vjob 0.1.0. Change conf.yaml and submit again rather than this file.
#SBATCH --job-name=elastic-slave
#SBATCH --comment=vjob:plain-20260102-030405
#SBATCH --output=scheduler.slave.out
#SBATCH --open-mode=append
#SBATCH --time=90
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
#SBATCH --partition=gpu2
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=14
#SBATCH --gres=gpu:a10:4
# shellcheck disable=SC2016 # values are quoted so that nothing in them expands
set -euo pipefail

# A warning may come before there is anybody to tell, and without a trap it would end this script.
early=
for name in USR1 USR2; do
  # shellcheck disable=SC2064 # the name is meant to expand now
  trap "early=\"\$early $name\"" "$name"
done

run=/home/u/exp/log/plain-20260102-030405
group=slave
session= # the manager's, which is in another job
export VJOB_RUN=$run VJOB_GROUP=$group VJOB_SESSION=$session

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
  --kill-on-bad-exit=0 # the run goes on without a lost rank
  --no-kill            # nor does a lost node end the step
  --wait=0
  --ntasks-per-node=1  # one agent a node; it starts the ranks
)
# slave
node_0=(
  --nodes=3
  --cpus-per-task=14 # srun does not take it from the job in 22.05 to 23.02
  bash /home/u/exp/log/plain-20260102-030405/node.sh
)

step_pids=()
srun "${step[@]}" "${node_0[@]}" &
step_pids+=($!)

# The nodes of this job follow the manager of the run, which is in another one. Before the time
# limit, or a preemption, they ask it to let them go at the next checkpoint.
for name in TERM INT HUP; do
  # shellcheck disable=SC2064 # the name is meant to expand now
  trap "kill -$name ${step_pids[*]} 2>/dev/null || true" "$name"
done
# shellcheck disable=SC2317 # the trap below calls it
ask_to_leave() { agent morph leave --run "$run" --group "$group" || true; }
trap ask_to_leave USR1 USR2
[ -z "$early" ] || ask_to_leave
while kill -0 "${step_pids[@]}" 2>/dev/null; do
  wait "${step_pids[@]}" || true
done
status=0
wait "${step_pids[@]}" || status=$?
if [ "$(agent morph answer --run "$run" --session "$session" | tail -n 1)" = requeue ]; then
  come_again requeue "" "$warned"
fi
exit "$status"

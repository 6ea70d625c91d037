#!/usr/bin/env bash
# One node of run plain-20260102-030405, written by vjob 0.1.0; started once on each node.
# shellcheck disable=SC2016 # values are quoted so that nothing in them expands
set -euo pipefail
run=/home/u/exp/log/plain-20260102-030405

find_python() {
  local candidate
  for candidate in /opt/vjob/bin/python python3; do
    if command -v "$candidate" >/dev/null; then python=$candidate; return 0; fi
  done
  echo "vjob: no python3 on $(hostname); install one (3.8 or later)" >&2
  exit 112
}

# The conf's setup lines. If one fails, this node names it, before srun ends the others for it.
setup_line=
setup_failed() {
  local code=$?
  local host=${SLURMD_NODENAME:-${VJOB_NODE_NAME:-$(hostname)}}
  find_python
  "$python" /home/u/exp/log/plain-20260102-030405/agent.pyz setup-failed --run "$run" --attempt "$VJOB_ATTEMPT" --node "$host" \
    --script "$0" --line "$setup_line" --status "$code" || true
  exit 112
}
setup_begin=$LINENO
trap setup_failed EXIT # which bash calls line 1
# Not the failing command within a function such as module, but the line here that called it.
# DEBUG comes before each command, but not before a subshell, after which there is ERR.
trap '[ "$LINENO" -lt "$setup_begin" ] || setup_line=$LINENO' DEBUG ERR
cd /home/u/exp 2>/dev/null || true # preflight tells of a missing one
exec 3<&0 </dev/null # nothing here reads what is for the agent
set +u # module scripts read unset variables
module load cuda
set -u
exec 0<&3 3<&-
trap - EXIT DEBUG ERR

find_python
# exec: the agent must be the task itself, or signals end at this shell.
exec "$python" /home/u/exp/log/plain-20260102-030405/agent.pyz node --run "$run" --attempt "$VJOB_ATTEMPT" --tether

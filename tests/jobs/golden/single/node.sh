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

find_python
# exec: the agent must be the task itself, or signals end at this shell.
exec "$python" /home/u/exp/log/plain-20260102-030405/agent.pyz node --run "$run" --attempt "$VJOB_ATTEMPT"

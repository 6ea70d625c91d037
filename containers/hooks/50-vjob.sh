#!/usr/bin/env bash
# A hook for enroot: a container started by hand on a node of a vjob run gets the address, the port
# and the interface of that run, each only if it is unset. vjob's own ranks do not need it.
#
#   install -D -m 755 50-vjob.sh ~/.config/enroot/hooks.d/50-vjob.sh
#   srun --jobid=JOB --overlap --pty enroot start IMAGE bash
set -euo pipefail

state=${VJOB_RUN-}/attempt-${VJOB_ATTEMPT:-0}/state
[ -n "${VJOB_RUN-}" ] && [ -r "$state/master.json" ] || exit 0

set_if_unset() { grep -q "^$1=" "$ENROOT_ENVIRON" || echo "$1=$2" >>"$ENROOT_ENVIRON"; }

# FILE KEY: a plain value of the flat JSON that vjob writes.
read_value() {
  [ -r "$1" ] || return 0
  sed -n 's/^ *"'"$2"'": *"\{0,1\}\([^",]*\).*/\1/p' "$1" | head -n 1
}

address=$(read_value "$state/master.json" address)
port=$(read_value "$state/go.json" port)
[ -n "$port" ] || port=$(read_value "$state/master.json" port)
interface=$({ ip -o route get "$address" || true; } 2>/dev/null | sed -n 's/.* dev \([^ ]*\).*/\1/p')

set_if_unset MASTER_ADDR "$address"
set_if_unset MASTER_PORT "$port"
if [ -n "$interface" ]; then
  for name in GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME TP_SOCKET_IFNAME; do
    set_if_unset "$name" "$interface"
  done
fi

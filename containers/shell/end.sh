# Runs on a node by `bash -c`: ends and removes the containers that carry a label.
#
#   end LABEL TOOL...
#
# TOOL is podman or docker with its own options. Another process may remove one meanwhile.
set -euo pipefail
label=$1
shift

list() { "$@" ps --all --quiet --filter "label=$label"; }

said=
for ((i = 0; i < 20; i++)); do
  found=$(list "$@")
  [ -n "$found" ] || exit 0
  mapfile -t ids <<<"$found"
  said=$("$@" rm --force "${ids[@]}" 2>&1) || sleep 0.5
done
echo "$said" >&2
exit 1

# Runs on a node by `bash -c`: pulls an image unless it is there.
#
#   pull IMAGE QUESTION... -- TOOL...
#
# TOOL is podman or docker with its own options, QUESTION its command that succeeds where IMAGE is.
set -euo pipefail
image=$1
shift
question=()
while [ "$1" != -- ]; do
  question+=("$1")
  shift
done
shift
"$@" "${question[@]}" "$image" >/dev/null 2>&1 || "$@" pull --quiet "$image" >/dev/null

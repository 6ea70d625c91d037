# Runs on a node by `bash -c`: removes one unpacked image that only this run used.
#
#   remove BASE NAME
set -euo pipefail
base=$1 name=$2
root=$base/roots/$name
exec 9>"$base/roots/.$name.lock"
flock 9
if [ -d "$root" ] && [ ! -L "$root" ]; then
  chmod -R u+rwX "$root" 2>/dev/null || true # enroot leaves mount points of mode 000
fi
rm -rf "${root:?}" "$root.facts" "$base/roots/.$name.use"
rm -f "$base/roots/.$name.lock"

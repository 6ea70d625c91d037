# Runs on a node by `bash -c`: makes an unpacked image ready under a lock, once for all who ask.
#
#   prepare TOOL KIND IMAGE BASE NAME REUSE [SOURCE TARGET]...
#
# TOOL unpacks squashfs images (enroot or unsquashfs) or fetches references (apptainer, IMAGE as that
# writes it), KIND is squashfs, folder, archive or reference, REUSE is auto, true or false. Unpacks
# under a temporary name and renames when whole: parallel or killed `enroot create`s leave half trees
# that start all the same (seen with enroot 4.1.2).
set -euo pipefail
tool=$1 kind=$2 image=$3 base=$4 name=$5 reuse=$6
shift 6
roots=$base/roots root=$base/roots/$name facts=$base/roots/$name.facts

fail() { echo "$*" >&2; exit 3; }

make_base() {
  mkdir -p "$(dirname "$base")"
  mkdir -m 700 "$base" 2>/dev/null || true
  if [ ! -d "$base" ] || [ ! -O "$base" ] || [ -L "$base" ]; then
    fail "$base is not a folder of $(id -un): set container.scratch to a node-local folder of yours"
  fi
  chmod 700 "$base"
  mkdir -p "$roots" "$base/conf" "$base/runtime" "$base/temp" "$base/cache"
}

# The top two levels: a tree that a cleaner of old files or a full disk has torn lacks some of them.
list_tree() { (cd "$1" && find . -mindepth 1 -maxdepth 2 -not -path './tmp/*' | LC_ALL=C sort); }

describe_image() {
  if [ "$kind" = reference ]; then echo "$image"; else stat -L --printf='%n %s %Y\n' "$image"; fi
}

is_whole() {
  [ -d "$root/" ] && [ -f "$facts" ] || return 1
  if [ "$reuse" = auto ] && [ "$(head -n 1 "$facts")" != "$(describe_image)" ]; then return 1; fi
  [ -z "$(LC_ALL=C comm -23 <(tail -n +2 "$facts") <(list_tree "$root/"))" ]
}

count_free() { echo $(($(stat -f -c '%a * %S' "$roots"))); }

check_space() {
  local size free
  size=$(stat -L -c %s "$image")
  free=$(count_free)
  if [ "$free" -lt "$size" ]; then
    fail "No space left on $roots: $((free >> 20)) MiB are free, $image alone has $((size >> 20))" \
      "MiB packed; set container.scratch to a node-local folder with three times that"
  fi
  if [ "$free" -lt $((3 * size)) ]; then
    echo "warning: $roots has $((free >> 20)) MiB free; unpacked images need about three times" \
      "the image's $((size >> 20)) MiB" >&2
  fi
}

# rc 2 of unsquashfs also means what a user may not do: device nodes, which no container needs.
unpack_squashfs() {
  local log status=0
  log=$(mktemp -p "$base/temp")
  if [ "$tool" = enroot ]; then
    enroot create -n "$1" "$image" >"$log" 2>&1 || status=$?
  else
    unsquashfs -no-progress -user-xattrs -d "$roots/$1" "$image" >"$log" 2>&1 || status=$?
  fi
  if [ "$status" -ne 0 ] && { [ "$status" -ne 2 ] || has_other_errors "$log"; }; then
    grep -vE '^($|Parallel unsquashfs|created |[0-9]+ inodes|\[[=|/ -])' "$log" | tail -n 5 >&2 || true
    rm -f "$log"
    if [ "$(count_free)" -lt $((16 << 20)) ]; then
      fail "No space left on $roots while $image was unpacked: set container.scratch to a" \
        "node-local folder with three times its size"
    fi
    fail "$image could not be unpacked into $roots: $tool ended with $status"
  fi
  rm -f "$log"
}

# --fix-perms: else the tree has folders that not even its owner could remove.
fetch_reference() {
  local log status=0
  log=$(mktemp -p "$base/temp")
  apptainer build --sandbox --fix-perms "$roots/$1" "$image" >"$log" 2>&1 || status=$?
  if [ "$status" -ne 0 ]; then
    grep -v '^$' "$log" | tail -n 5 >&2 || true
    rm -f "$log"
    fail "$image could not be fetched into $roots: apptainer ended with $status"
  fi
  rm -f "$log"
}

has_other_errors() {
  grep -iE 'error|fail|could not|corrupt|No space' "$1" |
    grep -qvE 'could not create (character|block) device|because you.re not superuser|non-fatal' 
}

unpack() {
  local part=$name.part.$$
  rm -rf "${root:?}".part.* # of prepares that were killed
  trap 'rm -rf "${roots:?}/'"$part"'"' EXIT
  case $kind in
    squashfs) check_space && unpack_squashfs "$part" ;;
    archive)
      check_space
      mkdir "$roots/$part"
      tar -xf "$image" -C "$roots/$part" --no-same-owner --exclude='./dev/*' --exclude='dev/*' ;;
    folder) cp -a "$image/." "$roots/$part" ;;
    reference) fetch_reference "$part" ;;
  esac
  chmod u+rwx "$roots/$part"
  if [ -e "$root" ] && [ ! -L "$root" ]; then
    mv "$root" "$root.part.old.$$" # torn, or of an older image: nobody starts in it any more
  fi
  rm -f "$facts"
  mv -T "$roots/$part" "$root"
  # What was torn may belong to mapped users, and is in nobody's way.
  rm -rf "$root".part.old.* 2>/dev/null || true
}

# Mount points, for those runtimes that cannot make them in a read-only root.
make_target() {
  local source=$1 target=$2 path=$root rest word
  rest=${target#/}
  case $rest/ in tmp/* | dev/* | proc/* | sys/*) return ;; esac
  while [ -n "$rest" ]; do
    word=${rest%%/*}
    case $rest in */*) rest=${rest#*/} ;; *) rest='' ;; esac
    case $word in '' | .) continue ;; ..) return ;; esac
    path=$path/$word
    if [ -L "$path" ]; then return; fi # leads who knows where: the runtime follows it inside
    if [ -n "$rest" ] || [ -d "$source" ]; then
      [ -d "$path" ] || mkdir "$path" 2>/dev/null || return 0
    else
      [ -e "$path" ] || : 2>/dev/null >"$path" || return 0
    fi
  done
}

# Copies for one run alone (a name with its run in it) whose agent was killed, after an hour; and what
# was generated for runs of last month.
sweep_orphans() {
  local lock name
  find "$base/conf" -type f -mtime +30 -delete 2>/dev/null || true
  find "$roots" -maxdepth 1 -name '.vjob-????????????-*.lock' -mmin +60 -print0 2>/dev/null |
    while IFS= read -r -d '' lock; do
      name=${lock##*/.}
      name=${name%.lock}
      [ ! -e "$roots/.$name.use" ] || flock -n -x "$roots/.$name.use" true || continue
      flock -n -x "$lock" true || continue
      if [ -d "$roots/$name" ] && [ ! -L "$roots/$name" ]; then
        chmod -R u+rwX "$roots/$name" 2>/dev/null || true
      fi
      rm -rf "${roots:?}/$name" "$roots/$name.facts" "$roots/$name".part.* 2>/dev/null || true
      rm -f "$roots/.$name.use" "$lock"
    done
}

make_base
sweep_orphans
[ "$kind" = reference ] || [ -e "$image" ] || fail "$image is not on $(hostname)"
if [ "$kind" = folder ] && [ ! -e "$image/bin" ] && [ ! -L "$image/bin" ]; then
  fail "$image is not the root folder of an image: it has no bin in it"
fi
exec 9>"$roots/.$name.lock"
flock 9
if [ "$kind" = folder ] && [ "$reuse" != false ]; then
  ln -sfn "$image" "$root"
elif ! is_whole; then
  if [ -e "$facts" ]; then echo "unpacking $image again: $root is torn or of an older image" >&2; fi
  unpack
  { describe_image; list_tree "$root/"; } >"$facts"
fi
while [ $# -gt 1 ]; do
  make_target "$1" "$2"
  shift 2
done
for file in etc/hosts etc/resolv.conf etc/passwd etc/group; do # bound by runtimes where they exist
  if [ -d "$root/etc" ] && [ ! -L "$root/$file" ] && [ ! -e "$root/$file" ]; then
    : 2>/dev/null >"$root/$file" || true
  fi
done

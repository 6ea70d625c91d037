"""One look at each machine before anything starts: all that must be the same everywhere. Pure.

A script of plain `sh` says what it finds in lines `vjob KEY VALUE`; lines of the user's own start
files are passed over.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SEE_S = 3
"""A new folder may take so long to show on another machine's mount of it."""

_SCRIPT = """\
folder={folder} token={token} mark={mark}
echo "vjob user $(id -u)"
tries=0
while [ "$(cat "$folder/$token" 2>/dev/null)" != "$token" ] && [ $tries -lt {tries} ]; do
  tries=$((tries + 1)); sleep 0.5
done
if [ "$(cat "$folder/$token" 2>/dev/null)" = "$token" ]; then echo "vjob sees yes"; fi
if (: > "$folder/$mark") 2>/dev/null; then echo "vjob writes yes"; fi
for python in {python} python3 /usr/bin/python3; do
  if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 8))' >/dev/null 2>&1; then
    echo "vjob agent $python"; break
  fi
done
if command -v {python} >/dev/null 2>&1; then echo "vjob python yes"; fi
if cd {code_dir} 2>/dev/null; then
  echo "vjob code yes"
  if [ -r {script} ]; then echo "vjob script yes"; fi
fi
echo "vjob machine $(cat /proc/sys/kernel/random/boot_id 2>/dev/null) $(readlink /proc/self/ns/net)"
echo "vjob end yes"
"""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is looked for."""

    folder: Path
    """The run folder."""
    token: str
    """Name and content of a file in it."""
    python: str
    """Interpreter of the ranks."""
    code_dir: str
    script: str
    user: int
    """Who we are here."""
    folder_key: str = "--log_folder"
    python_key: str = "--python"
    code_key: str = "--code_dir"
    """What the user calls these."""


def render_probe(asked: Asked, mark: str) -> str:
    """The script; `mark` is the name of a file that it is to make in the run folder."""
    return _SCRIPT.format(
        folder=shlex.quote(str(asked.folder)),
        token=asked.token,
        mark=mark,
        tries=2 * SEE_S,
        python=shlex.quote(asked.python),
        code_dir=shlex.quote(asked.code_dir),
        script=shlex.quote(asked.script),
    )


def parse_probe(text: str) -> dict[str, str]:
    """What the script said."""
    found = re.findall(r"^vjob (\w+) (.*?)\r?$", text, re.MULTILINE)
    return {key: value for key, value in found if value.strip()}


def find_problem(asked: Asked, said: Mapping[str, str]) -> str | None:
    """What keeps the machine from the run, and what to do; one line."""
    if "end" not in said:
        return "the check there was cut off; try again, or run `/bin/sh -c true` there by hand"
    if "sees" not in said:
        text = (
            f"it does not see the run folder {asked.folder}: the folder must be on a file system "
            f"that all machines share (NFS, Lustre); name one with {asked.folder_key}"
        )
        if said.get("user") != str(asked.user):
            text += f"; you are user {asked.user} here and {said.get('user')} there"
        return text
    if "writes" not in said:
        return f"it cannot write to the run folder {asked.folder}: is it mounted read-only there?"
    if "agent" not in said:
        return f"neither {asked.python} nor a python3 from 3.8 is there; install one"
    if "python" not in said:
        return f"{asked.python} is not there: install it, or name another with {asked.python_key}"
    if "code" not in said:
        return (
            f"{asked.code_key} {asked.code_dir} is not there: it must have the same path everywhere"
        )
    if "script" not in said:
        return f"{asked.script} is not in {asked.code_dir} there"
    return None


def find_twins(names: Sequence[str], identities: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of entries that are one machine."""
    first: dict[str, str] = {}
    twins = []
    for name, identity in zip(names, identities, strict=True):
        if identity in first:
            twins.append((first[identity], name))
        first.setdefault(identity, name)
    return twins

"""The way into a container: one variable of shell code that sets all others, then execs. Pure.

Runtimes mangle environments, each in its own way: lines are cut at newlines, quotes stripped,
names dropped, values evaluated. So a runtime passes one variable of plain ASCII, and inside `sh`
makes the rest of it, below what the image itself sets:

    /bin/sh -c 'eval "$VJOB_ENTER"' vjob PROGRAM ARGUMENT...
"""

from __future__ import annotations

import re
from typing import Mapping

from varuna_core.agent.setup.errors import WRONG_INPUT, Refusal

VARIABLE = "VJOB_ENTER"
COMMAND = ("/bin/sh", "-c", f'eval "${VARIABLE}"', "vjob")
MAX_BYTES = 120_000
"""The kernel takes 128 KiB for one variable."""

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PLAIN = re.compile(r"[ -~]*\Z")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")

# Unpacked images keep their own variables in a file: enroot's in the first, charliecloud's in both.
_READ_IMAGE = (
    "for vjob_file in /etc/environment /ch/environment; do "
    'if [ -r "$vjob_file" ]; then '
    'while IFS= read -r vjob_line || [ -n "$vjob_line" ]; do '
    'vjob_name="${vjob_line%%=*}"; vjob_value="${vjob_line#*=}"; '
    'case "$vjob_line" in [A-Za-z_]*=*) ;; *) continue ;; esac; '
    'case "$vjob_name" in *[!A-Za-z0-9_]*) continue ;; esac; '
    'case "$vjob_value" in \\"*\\") vjob_value="${vjob_value#?}"; vjob_value="${vjob_value%?}" ;; '
    '\\\'*\\\') vjob_value="${vjob_value#?}"; vjob_value="${vjob_value%?}" ;; esac; '
    'export "$vjob_name=$vjob_value"; '
    'done < "$vjob_file"; fi; done; '
    "unset vjob_file vjob_line vjob_name vjob_value; "
)

# apptainer shows the GPU driver's libraries there, and only images of its own making look.
_LIBRARIES = (
    "[ ! -d /.singularity.d/libs ] || "
    'export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/.singularity.d/libs"; '
)


def build_entry(env: Mapping[str, str], workdir: str, *, reads_image: bool) -> str:
    """The code: the image's variables, ours over them, the home folder, the working directory."""
    parts = [_READ_IMAGE] if reads_image else []
    parts.append(f': "${{PATH:={PATH}}}"; export PATH; ')
    parts += [_export(name, env[name]) for name in sorted(env) if _NAME.match(name)]
    parts.append('[ -d "$HOME" ] || export HOME=/tmp; ')
    parts.append(_LIBRARIES)
    parts.append(_set("vjob_folder", workdir))
    parts.append(f'cd "$vjob_folder" || exit 125; unset vjob_folder OLDPWD {VARIABLE}; exec "$@"')
    code = "".join(parts)
    if len(code) > MAX_BYTES:
        what = f"the environment of a rank takes {len(code)} bytes, a container {MAX_BYTES}"
        raise Refusal(WRONG_INPUT, f"{what}: move long values of `env` to files")
    return code


def _export(name: str, value: str) -> str:
    return f"{_set(name, value)}export {name}; "


def _set(name: str, value: str) -> str:
    """An assignment of plain ASCII on one line, whatever the value is."""
    if _PLAIN.match(value):
        quoted = value.replace("'", "'\\''")
        return f"{name}='{quoted}'; "
    data = value.encode("utf-8", "surrogateescape")
    octal = "".join(chr(b) if chr(b).isalnum() and b < 128 else f"\\{b:03o}" for b in data)
    # The x keeps the newlines at the end, which $() would cut.
    return f'{name}="$(printf \'{octal}x\')"; {name}="${{{name}%x}}"; '

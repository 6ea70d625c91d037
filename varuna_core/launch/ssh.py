"""Build ssh's command line, explain its errors, and probe a machine before anything starts. This
module starts no process.

The script for the other machine is sent over standard input to `/bin/sh -s`: the user's login
shell, of whatever kind, sees only these two words, and a process list does not show the script.

The probe is a script in plain `sh` that checks what must be equal on all machines, and prints lines
`vjob KEY VALUE`; other lines, from the user's own start files, are ignored.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from varuna_core.facts.catalogue.known_line import Scope
from varuna_core.facts.catalogue.tables import BUILT_IN, match_rows
from varuna_core.facts.remedy import Context
from varuna_core.launch.machines import Machine
from varuna_core.records.plan import Plan
from varuna_core.records.runfolder import RunFolder

OPTIONS = (
    "BatchMode=yes",  # nobody is there to answer a question
    "ConnectTimeout=15",
    "ServerAliveInterval=15",
    "ServerAliveCountMax=4",
    "ControlMaster=no",  # one that stays behind would hold our pipes open
    "ClearAllForwardings=yes",  # the same port on every connection: the second one would fail
)
FAILED = 255
"""Exit code of ssh for its own failures, such as a lost connection."""


def build_ssh_command(machine: Machine, config: str | None = None) -> list[str]:
    """Return the command that runs a script from standard input on a machine."""
    command = ["ssh", "-T", "-x"]
    if config is not None:
        command += ["-F", config]
    for option in OPTIONS:
        command += ["-o", option]
    if machine.user is not None:
        command += ["-l", machine.user]
    if machine.port is not None:
        command += ["-p", str(machine.port)]
    return [*command, machine.host, "exec /bin/sh -s"]


def keep_ssh_agent(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that let ssh use the user's key agent."""
    name = "SSH_AUTH_SOCK"
    return {name: environ[name]} if name in environ else {}


def render_script(words: Sequence[str], env: Mapping[str, str]) -> str:
    """Render a script that executes a command, which then reads the rest of standard input."""
    settings = [f"{name}={shlex.quote(value)}" for name, value in env.items()]
    return f"exec env {' '.join(settings)} {shlex.join(words)}\n"


def explain_failure(machine: Machine, errors: str) -> str:
    """Explain from ssh's output why it failed, and what to do."""
    lines = [line.strip() for line in errors.splitlines() if line.strip(" @\r\n")]
    row = BUILT_IN.match(Scope.SSH, "\n".join(lines))
    if row is not None:
        said = next(line for line in lines if match_rows([row], line))
        text = row.explain(Context.MACHINES, spell_address(machine))
        return f"{text} (ssh: {said})"
    return f"ssh: {lines[-1]}" if lines else "ssh failed without a message"


def spell_address(machine: Machine) -> str:
    """Return the words after `ssh` that a person would type to reach the machine."""
    port = f"-p {machine.port} " if machine.port is not None else ""
    user = f"{machine.user}@" if machine.user is not None else ""
    return f"{port}{user}{machine.host}"


PROBE_S = 60.0
"""Time limit of a probe in seconds."""
SEE_S = 3
"""Seconds that a new folder may take to appear on another machine's mount of it."""
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
if boot=$(cat /proc/sys/kernel/random/boot_id 2>/dev/null); then
  echo "vjob machine $boot $(readlink /proc/self/ns/net)"
fi
echo "vjob end yes"
"""


@dataclass(frozen=True, kw_only=True)
class ProbeRequest:
    """Requirements that a probe checks on a machine."""

    folder: Path
    """The run folder."""
    token: str
    """Name and content of a file in the run folder."""
    python: str
    """Interpreter of the ranks; a bare name may exist only after the conf's setup lines, so the
    agent checks it later."""
    code_dir: str
    """The plan's code folder; `/` if ranks do not need it."""
    script: str
    user: int
    """User id of this process."""


def request_probe(run: RunFolder, plan: Plan, token: str) -> ProbeRequest:
    """Return the requirements for a machine that is to take part in a run."""
    return ProbeRequest(
        folder=run.path,
        token=token,
        python="python3" if plan.containers else plan.command[0],
        code_dir=plan.workdir if plan.workdir in plan.must_exist else "/",
        script=str(run.node_script),
        user=os.getuid(),
    )


def render_probe(asked: ProbeRequest, mark: str) -> str:
    """Render the script of a probe; `mark` is a file that it creates in the run folder."""
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
    """Parse the output of a probe's script into keys and values."""
    found = re.findall(r"^vjob (\w+) (.*?)\r?$", text, re.MULTILINE)
    return {key: value for key, value in found if value.strip()}


def explain_probe(asked: ProbeRequest, said: Mapping[str, str]) -> str | None:
    """Return why the machine cannot take part in the run, and what to do; None if it can."""
    if "end" not in said:
        return "the check was interrupted; try again, or run `/bin/sh -c true` there by hand"
    if "sees" not in said:
        text = (
            f"the machine does not see the run folder {asked.folder}, which must be on a file "
            "system that all machines share (NFS, Lustre); set log_folder to one"
        )
        if said.get("user") != str(asked.user):
            text += f"; you are user {asked.user} here and {said.get('user')} there"
        return text
    if "writes" not in said:
        return (
            f"the machine cannot write to {asked.folder}, the run folder: is it mounted read-only?"
        )
    if "agent" not in said:
        return f"the machine has neither {asked.python} nor a python3 of 3.8 or newer; install one"
    if "python" not in said and "/" in asked.python:
        return f"the machine has no {asked.python}: install it, or set program.python to another"
    if "code" not in said:
        return (
            f"the machine has no workdir {asked.code_dir}: the path must be the same on all of them"
        )
    if "script" not in said:
        return f"the machine cannot read {asked.script}"
    return None


def read_probe(
    asked: ProbeRequest, machine: Machine, code: int | None, out: bytes, err: bytes
) -> tuple[dict[str, str], str | None]:
    """Return what a probe found, and why the machine cannot take part in the run, if so."""
    said = parse_probe(out.decode("utf-8", "replace"))
    problem = explain_probe(asked, said)
    if problem is not None and code == FAILED and not machine.is_local:
        problem = explain_failure(machine, err.decode("utf-8", "replace"))
    elif problem is not None and (code is None or code < 0):  # killed, perhaps just now
        problem = f"no answer within {PROBE_S:g} s: is a mount dead, or does the shell wait?"
    return said, problem


def find_twins(names: Sequence[str], identities: Sequence[str]) -> list[tuple[str, str]]:
    """Return pairs of entries that are the same machine; one without an identity is unique."""
    first: dict[str, str] = {}
    twins = []
    for name, identity in zip(names, identities, strict=True):
        if identity and identity in first:
            twins.append((first[identity], name))
        first.setdefault(identity, name)
    return twins

"""ssh's command line, and its errors as one line that says what to do. Pure.

What the other side is to run goes over standard input to `/bin/sh -s`: the user's login shell, of
whatever kind, sees two words, and a process list shows nothing of it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from varuna_core.launch.machines import Machine

OPTIONS = (
    "BatchMode=yes",  # nobody is there to answer a question
    "ConnectTimeout=15",
    "ServerAliveInterval=15",
    "ServerAliveCountMax=4",
    "ControlMaster=no",  # one that stays behind would hold our pipes open
    "ClearAllForwardings=yes",  # the same port on every connection: the second one would fail
)
FAILED = 255
"""ssh's own failures, among them a lost connection."""

_REASONS = (
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED",
        "its host key is not the one in known_hosts; if the machine was set up anew, "
        "`ssh-keygen -R` its name and `{ssh}` once by hand",
    ),
    (
        r"Host key verification failed|host key is known",
        "its host key is not known here; `{ssh}` once by hand and compare the key",
    ),
    (
        r"Permission denied|Too many authentication failures",
        "it refused the login: `{ssh}` must work without a password (ssh-copy-id, or IdentityFile "
        "in ~/.ssh/config)",
    ),
    (
        r"Could not resolve hostname|Name or service not known",
        "no such host is known here; mend the list, or name it in ~/.ssh/config",
    ),
    (
        r"Connection (refused|timed out|reset)|timed out|No route to host|unreachable"
        r"|Connection closed|kex_exchange",
        "it cannot be reached; take it off the list, or see that its sshd runs and answers `{ssh}`",
    ),
    (r"Bad configuration option|Bad owner or permissions|Can't open user config", "ssh says so"),
)


def build_ssh_command(machine: Machine, config: str | None = None) -> list[str]:
    """The command that runs a script of standard input on a machine."""
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
    """What ssh needs of the user's shell to ask his agent for keys."""
    name = "SSH_AUTH_SOCK"
    return {name: environ[name]} if name in environ else {}


def render_script(words: Sequence[str], env: Mapping[str, str]) -> str:
    """The script that becomes a command, its standard input left to it."""
    settings = [f"{name}={shlex.quote(value)}" for name, value in env.items()]
    return f"exec env {' '.join(settings)} {shlex.join(words)}\n"


def explain_failure(machine: Machine, errors: str) -> str:
    """Why ssh failed, from what it wrote, and what to do."""
    lines = [line.strip() for line in errors.splitlines() if line.strip(" @\r\n")]
    for pattern, advice in _REASONS:
        said = [line for line in lines if re.search(pattern, line)]
        if said:
            return f"{advice.format(ssh=spell_ssh(machine))} (ssh: {said[0]})"
    return f"ssh: {lines[-1]}" if lines else "ssh failed without a word"


def spell_ssh(machine: Machine) -> str:
    """What a person would type to get there."""
    port = f" -p {machine.port}" if machine.port is not None else ""
    user = f"{machine.user}@" if machine.user is not None else ""
    return f"ssh{port} {user}{machine.host}"

"""The container on this node: choice of a runtime that works, preparation, entry, cleaning.

Runtimes mangle environments, each in its own way: lines are cut at newlines, quotes stripped,
names dropped, values evaluated. So a runtime passes one variable of plain ASCII, from which `sh`
sets all others inside the container, over those that the image itself sets:

    /bin/sh -c 'eval "$VJOB_ENTER"' vjob PROGRAM ARGUMENT...
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from typing import Callable, Iterator, List, Mapping, Optional, Sequence

from varuna_core.agent.processes.output import Sink
from varuna_core.agent.processes.process import find_program, run
from varuna_core.agent.setup.site import WRONG_INPUT, Refusal, Site
from varuna_core.agent.setup.world import is_kept_of_slurm
from varuna_core.records.nodes import FAIL, OK, Check
from varuna_core.records.plan import GPUS, ContainerPlan, Plan, compute_node_values
from varuna_core.records.training import VARIABLES

ENTRY_VARIABLE = "VJOB_ENTER"
ENTRY_COMMAND = ("/bin/sh", "-c", f'eval "${ENTRY_VARIABLE}"', "vjob")
ENTRY_BYTES = 120_000
"""Most bytes of one environment variable, a little less than the kernel's limit of 128 KiB."""
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
# A folder of that name in the root is no home: enroot's hook makes one that later runs share.
_FIND_HOME = (
    "vjob_home=/tmp; [ -r /proc/self/mountinfo ] || vjob_home=$HOME; "
    "while read -r vjob_x vjob_x vjob_x vjob_x vjob_at vjob_x; do "
    'case "$HOME/" in "$vjob_at"/*) vjob_home=$HOME ;; esac; '
    "done 2>/dev/null </proc/self/mountinfo; "
    '[ -d "$vjob_home" ] || vjob_home=/tmp; '
    'export HOME="$vjob_home"; unset vjob_home vjob_at vjob_x; '
)
# apptainer shows the GPU driver's libraries there, and only images of its own making look.
_LIBRARIES = (
    "[ ! -d /.singularity.d/libs ] || "
    'export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/.singularity.d/libs"; '
)


def build_entry(
    env: Mapping[str, str], workdir: str, *, reads_image: bool, python_path: str | None = None
) -> str:
    """Build shell code that sets the image's variables, then ours, home and working folders.

    `python_path` comes before the PYTHONPATH of both.
    """
    parts = [_READ_IMAGE] if reads_image else []
    parts.append(f': "${{PATH:={PATH}}}"; export PATH; ')
    parts += [_export(name, env[name]) for name in sorted(env) if _NAME.match(name)]
    if python_path is not None:
        parts.append(_set("vjob_path", python_path))
        parts.append('export PYTHONPATH="$vjob_path${PYTHONPATH:+:$PYTHONPATH}"; unset vjob_path; ')
    parts.append(_FIND_HOME)
    parts.append(_LIBRARIES)
    parts.append(_set("vjob_folder", workdir))
    parts.append(
        f'cd "$vjob_folder" || exit 125; unset vjob_folder OLDPWD {ENTRY_VARIABLE}; exec "$@"'
    )
    code = "".join(parts)
    if len(code) > ENTRY_BYTES:
        raise Refusal(
            WRONG_INPUT,
            f"a rank's environment has {len(code)} bytes, but a container takes at most "
            f"{ENTRY_BYTES}: move long values of `env` to files",
        )
    return code


def _export(name: str, value: str) -> str:
    return f"{_set(name, value)}export {name}; "


def _set(name: str, value: str) -> str:
    """Return an assignment in plain ASCII on one line, for any value."""
    if _PLAIN.match(value):
        quoted = value.replace("'", "'\\''")
        return f"{name}='{quoted}'; "
    data = value.encode("utf-8", "surrogateescape")
    octal = "".join(chr(b) if chr(b).isalnum() and b < 128 else f"\\{b:03o}" for b in data)
    # The x keeps the newlines at the end, which $() would cut.
    return f'{name}="$(printf \'{octal}x\')"; {name}="${{{name}%x}}"; '


PROBE_S = 20.0
_STRAY = re.compile(r"SLURM|SBATCH|PMI|PYTHON|VJOB_|(APPTAINER|SINGULARITY)ENV_")
"""Variables that the container runtime's own process must not see, since hooks of images would act
on them or they would enter the container."""
_OF_STEP = re.compile(r"(SLURM|SBATCH|SRUN|SPANK|_SLURM|PMI|PYXIS|ENROOT)|(PWD|OLDPWD|SHLVL|_)$")
"""Variables that srun or the shell brought into a container that srun started, and that the image
itself does not set."""


def choose_container(site: Site) -> tuple[ContainerPlan | None, list[Check]]:
    """Return the first of the plan's runtimes that works here."""
    said = []
    for container in site.plan.containers:
        problem = _probe(site, container)
        if problem is None:
            return container, []
        said.append(f"{container.runtime}: {problem}")
    if not said:
        return None, []
    text = f"no container runtime works here: {'; '.join(said)}"
    return None, [fail_check(site, text)]


def fail_check(site: Site, text: str) -> Check:
    """Return a container's failed check, with the remedy of the run's known lines, if any."""
    from varuna_core.agent.setup.known_lines import add_remedy  # slow: the whole catalogue

    return Check("container", FAIL, add_remedy(site.run, site.plan, text))


def _probe(site: Site, container: ContainerPlan) -> str | None:
    """Return why the runtime does not work; None if it works."""
    env = build_environment(container, site.env)
    if find_program(container.probe[0], env.get("PATH")) is None:
        return "not installed"
    result = run(container.probe, timeout_s=PROBE_S, env=env, stopping=site.stopping)
    if result.code == 0:
        return None
    return read_last_words(result.err or result.out) or f"{container.probe[0]} ended badly"


def build_environment(container: ContainerPlan, own: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the runtime's own processes."""
    base = {name: value for name, value in own.items() if not _STRAY.match(name)}
    base.setdefault("USER", str(os.getuid()))  # charliecloud refuses to start without one
    return {**base, **container.env}


def leave_step(own: Mapping[str, str], is_folder: Callable[[str], bool]) -> dict[str, str]:
    """Return the part of the environment of an agent in a container that its ranks may have."""
    kept = (*filter(is_kept_of_slurm, own), "SLURM_JOB_ID")
    env = {name: own[name] for name in own if not _OF_STEP.match(name) or name in kept}
    env.setdefault("PATH", PATH)
    if not is_folder(env.get("HOME", "")):
        env["HOME"] = "/tmp"
    if not is_folder(env.get("TMPDIR", "/")):  # set on the node, by a task prolog
        del env["TMPDIR"]
    return env


def fill_in(words: Sequence[str], site: Site, rank: int | None = None) -> tuple[str, ...]:
    """Replace `%{node}`, `%{attempt}`, `%{rank}`, `%{folder}` and the like in words."""
    known = {
        "node": site.host,
        "attempt": str(site.attempt.number),
        "rank": str(rank),
        "local_rank": str(None if rank is None else rank - site.node.first_rank),
        "percent": "%",
        "folder": str(site.run.path),
        "stage_map": site.plan.stage_map,
        "batch_share": str(_share_batch(site.plan)),
        "user": f"{os.getuid()}:{os.getgid()}",
        "holder": str(site.facts.holder),
        **compute_node_values(site.plan, site.node, site.master.address, site.master.port),
    }
    by_vendor = {} if site.container is None else site.container.gpu_options
    options = by_vendor.get(site.accelerator.name, ())
    known["num_gpu_options"] = str(len(options))
    filled: List[str] = []
    for word in words:
        if word == GPUS:
            filled += options
        else:
            filled.append(re.sub(r"%\{([\w.]+)\}", lambda m: known.get(m[1], m[0]), word))
    return tuple(filled)


def _share_batch(plan: Plan) -> Optional[int]:
    """Return the samples of a step for each replica, if the conf gives the total."""
    batch = plan.env.get(VARIABLES["train.global_batch_size"], "")
    return int(batch) // plan.data if batch.isdecimal() else None


def prepare_container(site: Site, container: ContainerPlan) -> list[Check]:
    """Run the container's prepare commands in order, up to the first that fails."""
    log = Sink(site.attempt.node_log(site.host, "err"))
    begun = time.monotonic()
    deadline = begun + site.plan.timing.prepare_s
    try:
        for argv in container.prepare:
            left = deadline - time.monotonic()
            problem = _run_step(site, container, argv, left, log, site.stopping)
            if problem is not None:
                return [fail_check(site, problem)]
    finally:
        log.close()
    took = time.monotonic() - begun
    return [Check("container", OK, f"{container.runtime} prepared in {took:.1f} s")]


def clean_container(site: Site, container: ContainerPlan, timeout_s: float) -> None:
    """Run the container's clean commands, each regardless of the result of the one before."""
    if not container.clean:
        return
    log = Sink(site.attempt.node_log(site.host, "err"))
    deadline = time.monotonic() + timeout_s
    for argv in container.clean:
        left = max(deadline - time.monotonic(), 1)
        problem = _run_step(site, container, argv, left, log, lambda: False)
        if problem is not None:
            log.write(f"vjob: cleaning up: {problem}\n".encode("utf-8", "replace"))
    log.close()


@contextlib.contextmanager
def hold_lease(site: Site, lease: str) -> Iterator[None]:
    """Hold a shared lock on the file `lease` while ranks run, so that `vjob container clean` does
    not remove the image that the ranks run in."""
    (path,) = fill_in([lease], site)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        yield
    finally:
        os.close(fd)


def _run_step(
    site: Site,
    container: ContainerPlan,
    argv: Sequence[str],
    timeout_s: float,
    log: Sink,
    stopping: Callable[[], bool],
) -> str | None:
    """Run one command of the container, with its output in the node's log; return the reason if the
    command failed, else None."""
    result = run(
        fill_in(argv, site),
        timeout_s=max(timeout_s, 0),
        env={**build_environment(container, site.env), "VJOB_NODE": site.host},
        cwd="/",
        stopping=stopping,
    )
    for line in (result.out + result.err).splitlines():
        log.write(f"vjob {argv[0]}: {line}\n".encode("utf-8", "surrogateescape"))
    if result.code == 0:
        return None
    how = f"exited {result.code}" if result.code is not None else "took too long and was ended"
    said = read_last_words(result.err or result.out) or "without a word"
    return f"{container.runtime} {how}: {said}"


def read_last_words(text: str) -> str:
    """Return the last three lines of a command's output as one line."""
    lines = dict.fromkeys(line.strip() for line in text.splitlines() if line.strip())
    return " | ".join(list(lines)[-3:])

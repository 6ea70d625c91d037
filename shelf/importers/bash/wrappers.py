"""Recognize the words before a program on a command line: srun, env, a container's runtime."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vjob.jobs.programs.launchers import LAUNCHERS, WRAPPERS, is_python


def list_words(text: str) -> frozenset[str]:
    return frozenset(text.split())


SHELLS = list_words("bash sh zsh dash ksh")
SETUP = list_words(
    "apt apt-get aws chmod chown cmake cmp column conda cp curl dcgmi deactivate df diff dstat du "
    "env file find free gcloud git gpustat gsutil gunzip hf hostname htop huggingface-cli ibstat "
    "ibv_devinfo id ifconfig iostat ip jq jutil kubectl ldd less ln ls lscpu lsof lspci make mamba "
    "md5sum micromamba mkdir ml module more mpstat mv nc ninja nvcc nvtop pip pip3 printenv ps "
    "ray rm rmdir rsync sacct sar scancel scontrol scp sha256sum sinfo source spack squeue ssh- "
    "keygen kill stat stty sync sysctl tar touch tput trap truncate ulimit umask uname unset unzip "
    "vim vmstat wandb wget yq yum zip"
)
"""Commands that prepare or show something; a line with only such a command is not a launch."""
_FLAGS: Mapping[str, frozenset[str]] = {
    "srun": list_words(
        "l u v vv Q X k K s O Z I H E label unbuffered verbose quiet pty exclusive overlap no-kill "
        "oversubscribe contiguous spread-job use-min-nodes container-remap-root "
        "no-container-remap-root container-writable container-readonly container-mount-home "
        "no-container-mount-home no-container-entrypoint multi-prog disable-status test-only exact "
        "preserve-env reboot kill-on-bad-exit overcommit wait-all-nodes immediate whole"
    ),
}
"""Options without a value, of wrappers whose other options take a value."""
_SHARED = list_words("exec ionice nice nohup setsid stdbuf time timeout")
_VALUES: Mapping[str, frozenset[str]] = {
    **{name: frozenset(word.lstrip("-") for word in WRAPPERS[name]) for name in _SHARED},
    "nsys": frozenset(word.lstrip("-") for word in WRAPPERS["nsys profile"]),
    "env": list_words("u unset C chdir S"),
    "eval": frozenset(),
    "builtin": frozenset(),
    "sudo": list_words("u g"),
    "apptainer": list_words("B H W bind home pwd env env-file workdir overlay"),
    "singularity": list_words("B H W bind home pwd env env-file workdir overlay"),
    "enroot": list_words("m e c mount env conf"),
    "docker": list_words(
        "v e w volume env workdir gpus name network net shm-size ipc ulimit user u entrypoint p "
        "publish mount env-file runtime device h hostname"
    ),
    "ncu": list_words("o export target-processes set section metrics k kernel-name"),
}
"""Options whose value is the next word, for the other wrappers; those of wrappers other than
containers and profilers come from the table of launchers."""
_FLAGS_OF_SBATCH = list_words(
    "parsable wait verbose quiet hold test-only exclusive requeue no-requeue"
)
VERBS: Mapping[str, frozenset[str]] = {
    "apptainer": list_words("exec run"),
    "singularity": list_words("exec run"),
    "enroot": list_words("start exec"),
    "docker": list_words("run exec"),
    "nsys": list_words("profile"),
}
PLACED = list_words("apptainer singularity enroot docker timeout")
"""Wrappers with a positional argument after the options: an image, a container, a time."""
ALIASES: Mapping[str, str] = {"podman": "docker", "nvidia-docker": "docker"}


@dataclass(frozen=True, kw_only=True)
class Wrapper:
    """A wrapper and its own words, given by their indices in the command line."""

    name: str
    verb: str
    options: tuple[tuple[str, int, int], ...]
    """Options: name without dashes, index of the value (-1 for a flag), offset of the value in its
    word."""

    own: tuple[int, ...]
    """Indices of positional arguments: an image, a time, the assignments of `env`."""

    end: int
    """Index of the first word after the wrapper."""


def locate_program(words: Sequence[str]) -> int:
    """Return the index of the program after all wrappers; the number of words if there is none."""
    at = 0
    while (wrapper := find_wrapper(words, at)) is not None:
        at = wrapper.end
    return at


def find_wrapper(words: Sequence[str], at: int = 0) -> Wrapper | None:
    """Return the wrapper that begins at index `at`, if there is one."""
    name = posixpath.basename(words[at]) if at < len(words) else ""
    name = ALIASES.get(name, name)
    verb = words[at + 1] if name in VERBS and at + 1 < len(words) else ""
    if (name not in _VALUES and name not in _FLAGS) or (name in VERBS and verb not in VERBS[name]):
        return None
    at += 2 if verb else 1
    options: list[tuple[str, int, int]] = []
    own: list[int] = []
    while at < len(words):
        word = words[at]
        if word == "--":
            at += 1
            break
        if word.startswith("-") and len(word) > 1:
            options.append(_read_option(name, words, at))
            at = max(at, options[-1][1])
        elif (name in PLACED and not own) or (name == "env" and re.match(r"[A-Za-z_]\w*=", word)):
            own.append(at)
        else:
            break
        at += 1
    return Wrapper(name=name, verb=verb, options=tuple(options), own=tuple(own), end=at)


def _read_option(name: str, words: Sequence[str], at: int) -> tuple[str, int, int]:
    bare = words[at].lstrip("-")
    option, equals, _ = bare.partition("=")
    is_long = words[at].startswith("--")
    if equals:
        return option, at, len(words[at]) - len(bare) + len(option) + 1
    if name in _FLAGS:
        if not is_long and len(bare) > 1 and bare not in _FLAGS[name]:
            return bare[0], at, 2  # -n4
        takes = bare not in _FLAGS[name]
    else:
        takes = bare in _VALUES[name]
    return (option, at + 1, 0) if takes and at + 1 < len(words) else (option, -1, 0)


def find_batch_file(words: Sequence[str]) -> tuple[int, str | None]:
    """Return the index of sbatch's script among the words, and the text of --wrap."""
    at, wrap = 1, None
    while at < len(words) and words[at].startswith("-"):
        name, equals, value = words[at].partition("=")
        takes = not equals and name.lstrip("-") not in _FLAGS_OF_SBATCH
        takes = takes and (name.startswith("--") or len(name) == 2)
        if name == "--wrap":
            wrap = value if equals else (words[at + 1] if at + 1 < len(words) else "")
        at += 2 if takes else 1
    return min(at, len(words)), wrap


def is_launch(words: Sequence[str]) -> bool:
    """Return True if a command line starts a program that does more than prepare."""
    at = locate_program(words)
    names = {posixpath.basename(word) for word in words[:1]}
    if at >= len(words):
        return bool(at > 0 and names - {"env", "exec", "eval", "time", "timeout"})
    name = posixpath.basename(words[at])
    rest = list(words[at + 1 :])
    if name.startswith(("@", "-")) or not name:
        return False
    if any(
        "@OUT:xargs@" in word for word in rest
    ):  # once for each of its inputs, as files are fetched
        bare = map(posixpath.basename, words)
        return any(is_python(word) or word in LAUNCHERS for word in bare)
    if name in ("conda", "mamba", "micromamba", "ray"):
        return rest[:1] == ["run"] or (name == "ray" and rest[:2] == ["job", "submit"])
    if name == "wandb":
        return rest[:1] == ["agent"]  # it starts the trainings of a sweep
    if name in ("python", "python2", "python3") or re.fullmatch(r"python3\.\d+", name):
        return _is_python_launch(rest)
    if name in ("uv", "poetry", "pixi", "pdm", "rye", "pipenv", "hatch"):
        return rest[:1] == ["run"]
    return name not in SETUP and name != "enroot" and not name.endswith("-smi")


def _is_python_launch(rest: list[str]) -> bool:
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c", "-", "-V"):
        if rest[0] == "--version":
            return False
        rest = rest[2 if rest[0] in ("-X", "-W") else 1 :]
    if not rest or rest[0] in ("-c", "-", "-V", "setup.py"):
        return False
    tools = ("pip", "venv", "build", "compileall", "json.tool", "ensurepip", "site")
    return not (rest[0] == "-m" and (len(rest) < 2 or rest[1].partition(".")[0] in tools))

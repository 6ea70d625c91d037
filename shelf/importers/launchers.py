"""Command lines to what they start: the launcher, its options, the script, and what wraps them.

Wrappers are srun, `enroot start`, `docker run`, `nsys profile`, `ncu`, `bash -c`, nohup; launchers
are Varuna's run_varuna, torch's launch and torchrun, deepspeed, and python by itself.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from vjob.shelf.importers.shell import SHORT, Command, Word

Kind = Literal["deepspeed", "varuna", "torch", "python"]
Options = dict[str, Word]
"""By long name without dashes; a flag's word is empty."""
_NOT_TRAINING = re.compile(
    r"setup\.py|.{0,999}(?:preprocess|download|convert|report|visuali|plot)\w{0,99}\.py",
    re.IGNORECASE,
)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Options that take no value, by program: all others take the next word.
_FLAGS: Mapping[str, frozenset[str]] = {
    "srun": _names(
        "exclusive overlap label unbuffered pty verbose quiet overcommit contiguous no-kill "
        "container-remap-root no-container-remap-root container-writable container-readonly "
        "container-mount-home no-container-mount-home no-container-entrypoint disable-status "
        "multi-prog wait-all-nodes spread-job use-min-nodes exact kill-on-bad-exit "
        "l u v Q O K k s E"
    ),
    "enroot": _names("root rw r w"),
    "docker": _names("i t d it ti dit rm interactive tty detach privileged init read-only"),
    "nsys": _names("h help python-sampling-off"),
    "ncu": _names("f force-overwrite h help nvtx graph-profiling-off"),
    "varuna": _names("no_morphing resume cpu kill"),
    "torch": _names("use_env standalone m module no_python run_path use-env"),
    "deepspeed": _names(
        "module no_python no_local_rank force_multi save_pid elastic_training no_ssh "
        "bind_cores_to_rank enable_each_rank_log_off no_ssh_check"
    ),
    "python": _names("u B O OO s S E I q v b"),
}
_RENAMED: Mapping[str, str] = {
    "r": "root",
    "w": "rw",
    "m": "mount",
    "e": "env",
    "v": "volume",
    "i": "include",
    "H": "hostfile",
}


@dataclass(kw_only=True)
class Launch:
    """A training that a command line starts."""

    kind: Kind
    command: Command
    options: Options
    """The launcher's own."""
    script: Word
    args: tuple[Word, ...]


@dataclass(kw_only=True)
class Wrapping:
    """What stands before a launcher, or in a line of its own."""

    srun: list[tuple[Options, Command]] = field(default_factory=list)
    enroot: list[tuple[Options, Command]] = field(default_factory=list)
    docker: list[tuple[str, list[tuple[str, Word]], Word, Command]] = field(default_factory=list)
    """Its name, options in order, the image."""
    images: list[tuple[Word, Command]] = field(default_factory=list)
    """Of `enroot create`."""
    mounts: list[tuple[Word, Command]] = field(default_factory=list)
    profilers: list[tuple[str, list[tuple[str, Word]], Command]] = field(default_factory=list)
    env: list[tuple[Word, Command]] = field(default_factory=list)


@dataclass(kw_only=True)
class Lines:
    """All command lines of a script, sorted."""

    launches: list[Launch] = field(default_factory=list)
    wrapping: Wrapping = field(default_factory=Wrapping)
    setup: list[Command] = field(default_factory=list)
    """`module load`, `conda activate` and the like."""
    folders: list[Command] = field(default_factory=list)
    """`cd`."""
    others: list[Command] = field(default_factory=list)


LINE = re.compile(r"(?:deepspeed|torchrun|srun|python[0-9.]*)\s")
"""What a command line in a variable begins with."""


def sort_commands(commands: Sequence[Command]) -> Lines:
    lines = Lines()
    for command in commands:
        _sort_command(command, lines)
    return lines


def _sort_command(command: Command, lines: Lines) -> None:
    words = list(command.words)
    name = posixpath.basename(words[0].text)
    if name == "cd" and len(words) == 2:
        lines.folders.append(command)
        return
    if name in ("module", "conda", "ml") or (
        name in (".", "source") and len(words) == 2 and words[1].text.endswith("activate")
    ):
        lines.setup.append(command)
        return
    was_wrapped = False
    for _ in range(12):
        rest = _unwrap(words, command, lines.wrapping)
        if rest is None:
            break
        was_wrapped, words = True, rest
        if not words:
            break
    launch = _find_launch(words, command) if words else None
    if launch is not None:
        lines.launches.append(launch)
    elif not was_wrapped or (words and not _is_shell(words)):
        lines.others.append(command)


def _is_shell(words: Sequence[Word]) -> bool:
    """A shell, or a script that was read where it was started."""
    name = posixpath.basename(words[0].text)
    return name in ("bash", "sh", "zsh") or name.endswith(".sh")


def _unwrap(words: list[Word], command: Command, found: Wrapping) -> list[Word] | None:
    """The words within a wrapper; None where there is none."""
    name = posixpath.basename(words[0].text)
    second = words[1].text if len(words) > 1 else ""
    if name in ("nohup", "exec", "time", "sudo", "env"):
        words = words[1:]
        while words and re.match(r"[A-Za-z_]\w*=", words[0].text):
            found.env.append((words.pop(0), command))
        return words
    if name in ("bash", "sh") and second in ("-c", "-lc", "-ec"):
        return [Word(part, word.unknown) for word in words[2:] for part in word.text.split()]
    if name == "srun":
        pairs, rest = split_options(words[1:], _FLAGS["srun"])
        found.srun.append(({SHORT.get(key, key): value for key, value in pairs}, command))
        return rest
    if name == "enroot" and second in ("start", "exec"):
        pairs, rest = split_options(words[2:], _FLAGS["enroot"])
        options: Options = {}
        for key, value in pairs:
            key = _RENAMED.get(key, key)
            if key == "mount":
                found.mounts.append((value, command))
            elif key == "env":
                found.env.append((value, command))
            options[key] = value
        found.enroot.append((options, command))
        return rest[1:]
    if name == "enroot" and second == "create":
        pairs, rest = split_options(words[2:], frozenset({"f", "force"}))
        found.images += [(image, command) for image in rest[-1:]]
        return []
    if name in ("docker", "nvidia-docker", "podman") and second == "run":
        pairs, rest = split_options(words[2:], _FLAGS["docker"])
        if not rest:
            return None
        found.docker.append((name, pairs, rest[0], command))
        return rest[1:]
    if (name == "nsys" and second == "profile") or name == "ncu":
        pairs, rest = split_options(words[2 if name == "nsys" else 1 :], _FLAGS[name])
        found.profilers.append((name, pairs, command))
        return rest
    return None


def split_options(
    words: Sequence[Word], flags: frozenset[str]
) -> tuple[list[tuple[str, Word]], list[Word]]:
    """The options before the first other word, and all that follows."""
    pairs: list[tuple[str, Word]] = []
    left = list(words)
    while left and left[0].text.startswith("-") and left[0].text not in ("-", "--"):
        word = left.pop(0)
        name, equals, value = word.text.lstrip("-").partition("=")
        if equals:
            pairs.append((name, Word(value, word.unknown)))
        elif (
            name in flags
            or not left
            or _is_program(left[0])
            or (left[0].text.startswith("-") and not re.fullmatch(r"-\d+", left[0].text))
        ):
            pairs.append((name, Word("")))
        else:
            pairs.append((name, left.pop(0)))
    if left and left[0].text == "--":
        left = left[1:]
    return pairs, left


def _is_program(word: Word) -> bool:
    name = posixpath.basename(word.text)
    return bool(re.fullmatch(r"python[0-9.]*|torchrun|deepspeed|bash|sh|[\w.-]+\.py", name))


def _find_launch(words: list[Word], command: Command) -> Launch | None:
    name = posixpath.basename(words[0].text)
    if name == "torchrun":
        return _build_launch("torch", words[1:], command)
    if name in ("deepspeed", "ds"):
        return _build_launch("deepspeed", words[1:], command)
    if name == "run_varuna.py":
        return _build_launch("varuna", words[1:], command)
    if re.fullmatch(r"python[0-9.]*", name):
        return _find_python(words[1:], command)
    if name.endswith(".py") and not _NOT_TRAINING.fullmatch(name):
        return Launch(kind="python", command=command, options={}, script=words[0],
                      args=tuple(words[1:]))  # fmt: skip
    return None


def _find_python(words: list[Word], command: Command) -> Launch | None:
    while words and words[0].text.startswith("-") and words[0].text not in ("-m", "-c"):
        words = words[2 if words[0].text in ("-X", "-W") else 1 :]
    if len(words) > 1 and words[0].text == "-m":
        modules: Mapping[str, Kind] = {
            "torch.distributed.launch": "torch",
            "torch.distributed.run": "torch",
            "varuna.run_varuna": "varuna",
            "varuna_core.launch": "varuna",
            "deepspeed.launcher.runner": "deepspeed",
        }
        kind = modules.get(words[1].text)
        return None if kind is None else _build_launch(kind, words[2:], command)
    if not words or not (words[0].text.endswith(".py") or words[0].is_open):
        return None
    base = posixpath.basename(words[0].text)
    if base == "run_varuna.py":
        return _build_launch("varuna", words[1:], command)
    if _NOT_TRAINING.fullmatch(base):
        return None
    return Launch(kind="python", command=command, options={}, script=words[0],
                  args=tuple(words[1:]))  # fmt: skip


def _build_launch(kind: Kind, words: list[Word], command: Command) -> Launch | None:
    pairs, rest = split_options(words, _FLAGS[kind])
    renamed = _RENAMED if kind == "deepspeed" else {}
    options = {renamed.get(name, name).replace("-", "_"): value for name, value in pairs}
    if not rest:
        return None
    return Launch(kind=kind, command=command, options=options, script=rest[0],
                  args=tuple(rest[1:]))  # fmt: skip


def split_groups(args: Sequence[Word]) -> list[list[Word]]:
    """The words of each `--option`, as they were written; those before the first are a group."""
    groups: list[list[Word]] = []
    for word in args:
        if not groups or re.match(r"--?[A-Za-z]", word.text):
            groups.append([])
        groups[-1].append(word)
    return groups


def group_arguments(args: Sequence[Word]) -> list[tuple[str, tuple[Word, ...]]]:
    """Each `--option` with the words after it; words before the first have the name ""."""
    groups: list[tuple[str, list[Word]]] = []
    for word in args:
        if re.match(r"--?[A-Za-z]", word.text):
            name, equals, value = word.text.partition("=")
            groups.append((name, [Word(value, word.unknown)] if equals else []))
        elif groups:
            groups[-1][1].append(word)
        else:
            groups.append(("", [word]))
    return [(name, tuple(values)) for name, values in groups]

"""Command lines to what they start: the launcher, its options, the program, and what wraps them.

Wrappers are srun, `enroot start`, `docker run`, `nsys profile`, `ncu`, nohup; launchers that vjob
replaces are Varuna's run_varuna, torch's launch and torchrun, deepspeed, and python by itself. All
else is a command, word for word.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from vjob.jobs.programs.launchers import MODULES
from vjob.shelf.importers.bash.recording import SHORT, Word
from vjob.shelf.importers.script import Command

Kind = Literal["deepspeed", "varuna", "torch", "python", "command"]
Options = dict[str, Word]
"""By long name without dashes; a flag's word is empty."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Options that take no value, by program: all others take the next word.
FLAGS: Mapping[str, frozenset[str]] = {
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
        "bind_cores_to_rank no_ssh_check quiet q"
    ),
    "python": _names("u B O OO s S E I q v b"),
}
_ENROOT: Mapping[str, str] = {"r": "root", "w": "rw", "m": "mount", "e": "env"}
_DEEPSPEED: Mapping[str, str] = {
    "H": "hostfile", "i": "include", "e": "exclude", "q": "quiet", "num_accelerators": "num_gpus",
}  # fmt: skip


@dataclass(kw_only=True)
class Launch:
    """A training that a command line starts."""

    kind: Kind
    command: Command
    options: Options
    """The launcher's own."""
    script: Word
    """Its file, the module, or the first word of a command."""
    args: tuple[Word, ...]
    is_module: bool = False


@dataclass(kw_only=True)
class Wrapping:
    """Words before a launcher, or in a line of their own."""

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


def sort_commands(commands: Sequence[Command]) -> Lines:
    lines = Lines()
    for command in commands:
        words = list(command.words)
        while words and (rest := _unwrap(words, command, lines.wrapping)) is not None:
            words = rest
        if words:
            lines.launches.append(_build(words, command))
    return lines


def _unwrap(words: list[Word], command: Command, found: Wrapping) -> list[Word] | None:
    """The words within a wrapper; None where there is none."""
    name = posixpath.basename(words[0].text)
    second = words[1].text if len(words) > 1 else ""
    if name in ("nohup", "exec", "time", "sudo", "eval", "builtin", "setsid"):
        return None if second.startswith("-") and name != "time" else words[1:]
    if name == "env" and not second.startswith("-"):
        words = words[1:]
        while words and re.match(r"[A-Za-z_]\w*=", words[0].text):
            found.env.append((words.pop(0), command))
        return words
    if name == "srun":
        pairs, rest = split_options(words[1:], FLAGS["srun"])
        found.srun.append(({SHORT.get(key, key): value for key, value in pairs}, command))
        return rest
    if name == "enroot" and second in ("start", "exec"):
        pairs, rest = split_options(words[2:], FLAGS["enroot"])
        options: Options = {}
        for key, value in pairs:
            key = _ENROOT.get(key, key)
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
        pairs, rest = split_options(words[2:], FLAGS["docker"])
        if not rest:
            return None
        found.docker.append((name, pairs, rest[0], command))
        return rest[1:]
    if (name == "nsys" and second == "profile") or name == "ncu":
        pairs, rest = split_options(words[2 if name == "nsys" else 1 :], FLAGS[name])
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
            or re.match(r"-(?!\d+$)\S*$", left[0].text)
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


def _build(words: list[Word], command: Command) -> Launch:
    name = posixpath.basename(words[0].text)
    found = None
    if name == "torchrun":
        found = _build_launch("torch", words[1:], command)
    elif name in ("deepspeed", "ds"):
        found = _build_launch("deepspeed", words[1:], command)
    elif name == "run_varuna.py":
        found = _build_launch("varuna", words[1:], command)
    elif re.fullmatch(r"python[0-9.]*", name):
        found = _find_python(words[1:], command)
    elif name.endswith(".py"):
        found = Launch(kind="python", command=command, options={}, script=words[0],
                       args=tuple(words[1:]))  # fmt: skip
    return found or Launch(kind="command", command=command, options={}, script=words[0],
                           args=tuple(words[1:]))  # fmt: skip


def _find_python(words: list[Word], command: Command) -> Launch | None:
    while words and words[0].text.startswith("-") and words[0].text not in ("-m", "-c"):
        words = words[2 if words[0].text in ("-X", "-W") else 1 :]
    if len(words) > 1 and words[0].text == "-m":
        modules: Mapping[str, Kind] = {
            "torch.distributed.launch": "torch",
            "torch.distributed.run": "torch",
            "varuna.run_varuna": "varuna",
            "deepspeed.launcher.runner": "deepspeed",
        }
        module = words[1].text
        if module in modules:
            return _build_launch(modules[module], words[2:], command)
        if module in MODULES:
            return None
        return Launch(kind="python", command=command, options={}, script=words[1],
                      args=tuple(words[2:]), is_module=True)  # fmt: skip
    if not words or words[0].text.startswith("-"):
        return None
    if posixpath.basename(words[0].text) == "run_varuna.py":
        return _build_launch("varuna", words[1:], command)
    return Launch(kind="python", command=command, options={}, script=words[0],
                  args=tuple(words[1:]))  # fmt: skip


def _build_launch(kind: Kind, words: list[Word], command: Command) -> Launch | None:
    """None where it starts something else than a script or a module."""
    pairs, rest = split_options(words, FLAGS[kind])
    renamed = _DEEPSPEED if kind == "deepspeed" else {}
    options = {renamed.get(name, name).replace("-", "_"): value for name, value in pairs}
    is_module = any(options.pop(name, None) is not None for name in ("m", "module"))
    is_other = "no_python" in options or "run_path" in options
    if not rest or is_other or (is_module and kind != "torch"):
        return None
    return Launch(kind=kind, command=command, options=options, script=rest[0],
                  args=tuple(rest[1:]), is_module=is_module)  # fmt: skip


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

"""Split command lines into wrappers, launcher, options and program.

Wrappers are srun, `enroot start`, `docker run`, `nsys profile`, `ncu`, nohup; launchers that vjob
replaces are Varuna's run_varuna, torch's launch and torchrun, deepspeed, and python by itself. Any
other line is kept as a command, word for word.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from vjob.jobs.programs.launchers import MODULES
from vjob.shelf.importers.bash.recording import SHORT, Command, Word
from vjob.shelf.importers.bash.wrappers import find_wrapper, list_words

Kind = Literal["deepspeed", "varuna", "torch", "python", "command"]
Options = dict[str, Word]
"""Values by long name without dashes; the word of a flag is empty."""


# Options of launchers that take no value: all others take the next word.
FLAGS: Mapping[str, frozenset[str]] = {
    "varuna": list_words("no_morphing resume cpu kill"),
    "torch": list_words("use_env standalone m module no_python run_path use-env"),
    "deepspeed": list_words(
        "module no_python no_local_rank force_multi save_pid elastic_training no_ssh "
        "bind_cores_to_rank no_ssh_check quiet q"
    ),
}
PLAIN = list_words("nohup exec time sudo eval builtin setsid env")
"""Wrappers that have no effect of their own unless they have options."""
_ENROOT: Mapping[str, str] = {"r": "root", "w": "rw", "m": "mount", "e": "env"}
_DEEPSPEED: Mapping[str, str] = {
    "H": "hostfile", "i": "include", "e": "exclude", "q": "quiet", "num_accelerators": "num_gpus",
}  # fmt: skip


@dataclass(kw_only=True)
class Launch:
    """The program that a command line of a script starts, behind srun, torchrun and the like."""

    kind: Kind
    command: Command
    options: Options
    """The launcher's own options, as the script gives them."""
    script: Word
    """File of the script, the module, or the first word of a command."""
    args: tuple[Word, ...]
    is_module: bool = False
    interpreter: Word | None = None
    """Python that runs the script; of a launcher given by its path, the Python beside it."""


@dataclass(kw_only=True)
class Wrapping:
    """The wrappers (such as srun, containers and profilers) that precede the launches or stand on
    lines of their own."""

    srun: list[tuple[Options, Command]] = field(default_factory=list)
    enroot: list[tuple[Options, Command]] = field(default_factory=list)
    docker: list[tuple[list[tuple[str, Word]], Word, Command]] = field(default_factory=list)
    """Options in order, the image, and the command."""
    mounts: list[tuple[Word, Command]] = field(default_factory=list)
    profilers: list[tuple[str, list[tuple[str, Word]], Command]] = field(default_factory=list)
    env: list[tuple[Word, Command]] = field(default_factory=list)


@dataclass(kw_only=True)
class Lines:
    """All command lines of a script, split into launches and wrappers."""

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
    """Return the words after a wrapper that the conf can express; None without such a wrapper."""
    wrapper = find_wrapper([word.text for word in words])
    if wrapper is None or (wrapper.options and wrapper.name in PLAIN and wrapper.name != "time"):
        return None
    name, own = wrapper.name, [words[place] for place in wrapper.own]
    pairs = [(option, _cut(words[at], start) if at >= 0 else Word(""))
             for option, at, start in wrapper.options]  # fmt: skip
    if name == "env":
        found.env += [(word, command) for word in own]
    elif name == "srun":
        found.srun.append(({SHORT.get(key, key): value for key, value in pairs}, command))
    elif name == "enroot":
        options = {_ENROOT.get(key, key): value for key, value in pairs}
        kinds = [(_ENROOT.get(key, key), value) for key, value in pairs]
        found.mounts += [(value, command) for key, value in kinds if key == "mount"]
        found.env += [(value, command) for key, value in kinds if key == "env"]
        found.enroot.append((options, command))
    elif name == "docker" and wrapper.verb == "run" and own:
        found.docker.append((pairs, own[0], command))
    elif name in ("nsys", "ncu"):
        found.profilers.append((name, pairs, command))
    elif name not in PLAIN:
        return None
    return words[wrapper.end :]


def _cut(word: Word, start: int) -> Word:
    return Word(word.text[start:], word.unknown) if start else word


def split_options(
    words: Sequence[Word], flags: frozenset[str]
) -> tuple[list[tuple[str, Word]], list[Word]]:
    """Return the options before the first positional word, and the remaining words."""
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
    if found is None:
        return Launch(kind="command", command=command, options={}, script=words[0],
                      args=tuple(words[1:]))  # fmt: skip
    if name.endswith(".py"):
        return found
    folder = posixpath.dirname(words[0].text)
    beside = Word(posixpath.join(folder, "python"), words[0].unknown)
    return replace(found, interpreter=words[0] if name.startswith("python") else beside)


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
    """Build a launch; return None if the launcher starts neither a script nor a module."""
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
    """Group each `--option` with its words; words before the first option form a group, too."""
    groups: list[list[Word]] = []
    for word in args:
        if not groups or re.match(r"--?[A-Za-z]", word.text):
            groups.append([])
        groups[-1].append(word)
    return groups


def group_arguments(args: Sequence[Word]) -> list[tuple[str, tuple[Word, ...]]]:
    """Return each `--option` with its values; words before the first option have the name ""."""
    groups = []
    for first, *rest in split_groups(args):
        name, equals, value = first.text.partition("=")
        if not re.match(r"--?[A-Za-z]", name):
            groups.append(("", (first, *rest)))
        else:
            groups.append((name, ((Word(value, first.unknown),) if equals else ()) + tuple(rest)))
    return groups

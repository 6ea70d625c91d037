"""Recognize launchers: commands that start the ranks of their node themselves, such as torchrun.

`find_launcher` skips what may precede one: `uv run`, `env A=1`, `python -m`, a shell's `-c`.
Unknown commands count as no launcher.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath

LAUNCHERS: Mapping[str, tuple[str, ...]] = {
    "torchrun": (),
    "accelerate": ("launch",),
    "accelerate-launch": (),
    "deepspeed": (),
    "deepspeed.pt": (),
    "ds": (),
    "composer": (),
    "fabric": ("run",),
    "colossalai": ("run",),
    "horovodrun": (),
    "mpirun": (),
    "mpiexec": (),
    "mpiexec.hydra": (),
    "orterun": (),
    "prterun": (),
    "ipexrun": (),
    "tune": ("run",),
    "axolotl": ("train",),
    "llamafactory-cli": ("train",),
}
"""Commands that start ranks, with the words that must follow for that."""
MODULES: Mapping[str, tuple[str, ...]] = {
    "torch.distributed.run": (),
    "torch.distributed.launch": (),
    "accelerate.commands.launch": (),
    "accelerate.commands.accelerate_cli": ("launch",),
    "deepspeed.launcher.runner": (),
    "composer.cli.launcher": (),
    "lightning.fabric": ("run",),
    "axolotl.cli.main": ("train",),
}
"""Modules after `python -m` that start ranks, with the words that must follow."""
WRAPPERS: Mapping[str, tuple[str, ...]] = {
    "env": ("-u", "--unset", "-C", "--chdir"),
    "nice": ("-n", "--adjustment"),
    "ionice": ("-c", "-n", "--class", "--classdata"),
    "chrt": (),
    "taskset": ("-c", "--cpu-list"),
    "numactl": ("-m", "-N", "-C", "-i", "-p"),
    "nohup": (),
    "setsid": (),
    "time": ("-f", "-o", "--format", "--output"),
    "timeout": ("-k", "-s", "--kill-after", "--signal"),
    "stdbuf": ("-i", "-o", "-e"),
    "exec": ("-a",),
    "xvfb-run": ("-n", "-s", "-e", "-f"),
    "uv run": (
        *("-p", "--python", "--with", "--with-editable", "--with-requirements", "--extra"),
        *("--group", "--only-group", "--no-group", "--package", "--project", "--directory"),
        *("--env-file", "--index", "--index-url", "--extra-index-url", "--config-file", "-w"),
        *("--no-extra", "--cache-dir", "--link-mode", "--python-platform"),
    ),
    "poetry run": (),
    "pdm run": ("-p", "--project"),
    "hatch run": (),
    "rye run": (),
    "pipenv run": (),
    "conda run": ("-n", "--name", "-p", "--prefix", "--cwd"),
    "mamba run": ("-n", "--name", "-p", "--prefix", "--cwd"),
    "micromamba run": ("-n", "--name", "-p", "--prefix", "--cwd", "-r", "--root-prefix"),
    "pixi run": ("-e", "--environment", "--manifest-path"),
    "nsys profile": (
        *("-o", "-t", "-s", "-c", "-d", "-y", "-w", "-f", "--output", "--trace", "--sample"),
        *("--capture-range", "--capture-range-end", "--stop-on-exit", "--cuda-memory-usage"),
        "--force-overwrite",
    ),
    "coverage run": ("--source", "--rcfile", "--include", "--omit"),
    "py-spy record": ("-o", "-d", "-r", "-f"),
}
"""Wrappers that may precede a command, each with its options that take the next word."""
OPERANDS: Mapping[str, int] = {"timeout": 1, "taskset": 1, "chrt": 1}
"""For each wrapper, the number of operands before the command: the duration of timeout, the mask
of taskset, the priority of chrt."""
_SHELLS = ("sh", "bash", "dash", "zsh", "ksh")
_PYTHON = re.compile(r"python[\d.]*t?|pypy[\d.]*")
_PYTHON_VALUES = ("-W", "-X", "--check-hash-based-pycs")
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_ENDS = re.compile(r"[;&|()\n]+")


def find_launcher(words: Sequence[str]) -> str:
    """Return the launcher with which the words begin, as usually called; empty if none."""
    rest = list(skip_wrappers(words))
    if not rest:
        return ""
    name = PurePath(rest[0]).name
    if is_python(name):
        module, args = split_module(rest[1:])
        asked = MODULES.get(module)
        if asked is None or tuple(args[: len(asked)]) != asked:
            return ""
        return " ".join(("python -m", module, *asked))
    if name in _SHELLS:
        return next(filter(None, map(find_launcher, _list_inner(rest[1:]))), "")
    asked = LAUNCHERS.get(name)
    if asked is None or tuple(rest[1 : 1 + len(asked)]) != asked:
        return ""
    return " ".join((name, *asked))


def find_in_script(text: str) -> tuple[str, int]:
    """Return the first launcher that a shell script calls, and its line; ("", 0) if none.

    Only this text is searched; a script may call another script.
    """
    joined = text.replace("\\\n", " \0")
    for number, line in _number_lines(joined):
        for words in _split_commands(line):
            launcher = find_launcher(words)
            if launcher:
                return launcher, number
    return "", 0


def is_python(name: str) -> bool:
    """Return True for the name of a Python interpreter, such as python3.12."""
    return _PYTHON.fullmatch(name) is not None


def skip_wrappers(words: Sequence[str]) -> Sequence[str]:
    """Return the words without wrappers such as `env` and `uv run` before the command."""
    rest = list(words)
    while rest:
        while rest and _ASSIGNMENT.match(rest[0]):
            del rest[0]
        name = PurePath(rest[0]).name if rest else ""
        pair = " ".join((name, *rest[1:2]))
        wrapper = next((one for one in (pair, name) if one in WRAPPERS), None)
        if wrapper is None:
            return rest
        rest = rest[len(wrapper.split()) :]
        takes_list = wrapper == "taskset" and any(word in ("-c", "--cpu-list") for word in rest[:1])
        while rest and rest[0].startswith("-"):
            option = rest.pop(0)
            if option == "--":
                break
            if option in ("-m", "--module") and wrapper in ("uv run", "coverage run"):
                return ["python", "-m", *rest]
            if option in WRAPPERS[wrapper] and rest:
                del rest[0]
        if not takes_list:
            del rest[: OPERANDS.get(wrapper, 0)]
    return rest


def split_module(words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return the module after Python's `-m` and the words after it; empty if Python runs a file."""
    rest = list(words)
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        if option == "-m" or (option.endswith("m") and re.fullmatch(r"-[A-Za-z]+", option)):
            return (rest[0], rest[1:]) if rest else ("", ())
        if option in _PYTHON_VALUES and rest:
            del rest[0]
    return "", ()


def _list_inner(words: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield the simple commands in the text of a shell's `-c`, as in `bash -c TEXT`."""
    for at, word in enumerate(words[:-1]):
        if re.fullmatch(r"-[a-z]*c", word):
            for _, line in _number_lines(words[at + 1]):
                yield from _split_commands(line)
            return


def _number_lines(text: str) -> Iterator[tuple[int, str]]:
    number = 1
    for line in text.split("\n"):
        yield number, line.replace("\0", "")
        number += 1 + line.count("\0")


def _split_commands(line: str) -> Iterator[Sequence[str]]:
    """Split a line of a shell script into its simple commands, such as those around `&&`.

    A line with a quote that only the next line closes yields none.
    """
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|()\n")
    lexer.whitespace_split = True
    words: list[str] = []
    try:
        for word in lexer:
            if _ENDS.fullmatch(word):
                yield words
                words = []
            elif words or word not in ("then", "do", "else", "if", "while", "!", "{"):
                words.append(word)
    except ValueError:  # a quote that the next line closes
        return
    yield words

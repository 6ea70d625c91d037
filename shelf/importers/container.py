"""Build the section `container`: image, mounts and options of enroot, docker and pyxis."""

from __future__ import annotations

import posixpath
import shlex

from varuna_core.records.secrets import redact_string
from vjob.shelf.importers.bash.recording import Command, Word
from vjob.shelf.importers.copies import build_copies, list_inside
from vjob.shelf.importers.draft import Draft
from vjob.shelf.importers.launchers import Options
from vjob.shelf.importers.values import PYXIS, SRUN_REASONS


def build_container(draft: Draft) -> None:
    wrapping = draft.lines.wrapping
    _take_created(draft)
    mounts: list[str] = []
    for options, command in wrapping.enroot:
        draft.put("container.runtime", "enroot", f"{command.where}: enroot start")
        for name in options:
            said = f"{command.where}: enroot start --{name} {options[name].text}".rstrip()
            if name == "root":
                draft.put("container.remap_root", True, said)
            elif name == "rw":
                draft.put("container.writable", True, said)
            elif name not in ("mount", "env"):
                draft.note(f"{said} is left out: vjob has no counterpart")
        if "rw" not in options:
            draft.put("container.writable", False, f"{command.where}: enroot without --rw")
    for word, command in wrapping.mounts:
        _add_mounts(draft, word, f"{command.where}: --mount {word.text}", mounts)
    for options, command in wrapping.srun:
        _take_pyxis(draft, options, command, mounts)
    for pairs, image, command in wrapping.docker:
        _take_docker(draft, pairs, image, command, mounts)
    for word, command in wrapping.env:
        _add_env(draft, word, command)
    _take_copies(draft, mounts)
    if mounts:
        draft.values["container.mounts"] = mounts


def _take_created(draft: Draft) -> None:
    """Set the image that `enroot create` unpacks, its folder, and `reuse` (false if removed each
    time)."""
    inside = {id(one) for recording in draft.found.recordings for one in list_inside(recording)}
    removed = {
        word.text
        for recording in draft.found.recordings
        for one in recording.setup
        for word in one.words
        if one.texts[0] == "rm" and id(one) not in inside
    }
    tested = {path: where for one in draft.found.recordings for path, where in one.tested.items()}
    for command in draft.found.setup:
        words = [word.text for word in command.words]
        if posixpath.basename(words[0]) != "enroot" or words[1:2] != ["create"]:
            continue
        said = f"{command.where}: {command.raw}"
        if command.words[-1].is_open:
            draft.note(f"{said} is left out: the image is not known; set container.image")
            return
        draft.put("container.image", draft.shorten(words[-1]), said)
        named = [word for at, word in enumerate(words) if words[at - 1] in ("-n", "--name")]
        places = [path for path in {*removed, *tested} if posixpath.basename(path) in named]
        for place in places:
            if parent := _to_parent(place):
                draft.put("container.scratch", parent, f"{tested.get(place, said)}: {place}")
            how = "removed first" if place in removed else "unpacked only if it does not exist yet"
            draft.put("container.reuse", place not in removed, f"{place}: {how}")
        return


def _take_copies(draft: Draft, mounts: list[str]) -> None:
    """Convert copies in the container before the start: they are made on the node and mounted."""
    commands = [one for recording in draft.found.recordings for one in list_inside(recording)]
    copies = build_copies(
        list(dict.fromkeys(tuple(one.texts) for one in commands)),
        mounts,
        draft.values.get("container.scratch"),
    )
    mounts += copies.mounts
    if copies.setup:
        draft.values["setup"] = copies.setup
    reasons = dict(copies.left_out)
    for one in commands:
        said = shlex.join(one.texts)
        if said in reasons:
            draft.note(f"{one.where}: not done: {said}: {reasons[said]}")
        elif one.texts[0] == "cp" and copies.setup:
            draft.record(f"{one.where}: {said}", "setup, container.mounts")


def _to_parent(path: str) -> str | None:
    """Return the folder that contains `path`, the folder of an unpacked image; None for the root or
    an unprintable path."""
    parent = posixpath.dirname(path.rstrip("/"))
    return parent if parent != "/" and parent.isprintable() else None


def _add_mounts(draft: Draft, word: Word, said: str, mounts: list[str]) -> None:
    if word.is_open:
        draft.note(f"{said} is left out: its path is not known; set container.mounts")
        return
    for part in word.text.split(","):
        source, _, rest = part.partition(":")
        target, _, flags = rest.partition(":")
        target = target or source
        mount = f"{draft.shorten(source)}:{target}" + (":ro" if "ro" in flags.split("+") else "")
        if not source or not target.startswith("/"):
            draft.note(f"{said} is left out: a mount must be source:target with an absolute target")
        elif mount not in mounts:
            mounts.append(mount)
            draft.record(said, "container.mounts")


def _take_pyxis(draft: Draft, options: Options, command: Command, mounts: list[str]) -> None:
    for name, word in options.items():
        said = f"{command.where}: srun --{name}={word.text}".rstrip("=")
        if name not in PYXIS:
            continue
        if name == "container-mounts":
            _add_mounts(draft, word, said, mounts)
        elif word.is_open:
            draft.note(f"{said} is left out: its value is not known")
        elif PYXIS[name] is None:
            draft.note(f"{said} is left out: {SRUN_REASONS.get(name, 'it is so already')}")
        else:
            key, value = PYXIS[name] or ("", None)
            draft.put(key, draft.shorten(word.text) if value is None else value, said)
            if name == "container-image":
                draft.put("container.runtime", "pyxis", said)


def _take_docker(
    draft: Draft, pairs: list[tuple[str, Word]], image: Word, command: Command, mounts: list[str]
) -> None:
    said = f"{command.where}: docker run"
    if image.is_open:
        draft.note(f"{said} {image.text} is left out: the image is not known")
        return
    draft.put("container.image", f"docker://{image.text}", f"{said} {image.text}")
    for name, word in pairs:
        option = f"{said} {'-' if len(name) < 3 else '--'}{name} {word.text}".rstrip()
        if name in ("v", "volume"):
            _add_mounts(draft, word, option, mounts)
        elif name in ("e", "env"):
            _add_env(draft, word, command)
        elif name in ("w", "workdir") and not word.is_open:
            draft.put("container.workdir", word.text, option)
        elif name in ("net", "network", "ipc", "p", "publish", "shm-size"):
            draft.note(f"{option} is left out: network and /dev/shm are the node's")
        else:
            draft.note(f"{option} is left out: vjob starts the container")


def _add_env(draft: Draft, word: Word, command: Command) -> None:
    name, equals, value = word.text.partition("=")
    if word.is_open or not equals:
        draft.note(
            f"{command.where}: {redact_string(word.text)} is left out of env: its value is not "
            "known; add it to pass_env"
        )
        return
    draft.add(name, value, command.where)

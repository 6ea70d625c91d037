"""Make an anonymous archive for a bug report: `vjob doctor --report`.

The home folder, the user's name, the machine's names and its addresses are replaced by
placeholders; what looks like a secret is hidden as in `vjob share`.
"""

from __future__ import annotations

import contextlib
import getpass
import importlib.metadata
import json
import platform
import re
import socket
import sys
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from varuna_core.agent.meeting.network import list_addresses
from varuna_core.records.secrets import withhold
from vjob.jobs.errors import VjobError
from vjob.jobs.schedulers.diagnosis import Diagnosis
from vjob.shelf.doctor.doctor import find_version, render

ARCHIVE = "vjob-report.zip"
EXTRAS = ("torch", "nvidia-ml-py", "tokenizers", "zstandard", "isal", "torchao")
"""Optional packages that vjob uses if they are installed."""
NAMES_NOBODY = ("127.0.0.1", "/", "root", "localhost")


def write_archive(path: Path, diagnoses: Iterable[Diagnosis]) -> list[str]:
    """Write the archive of `vjob doctor --report` and return the names of the files in it.

    VjobError if `path` cannot be written.
    """
    found = list(diagnoses)
    hide = Hider.of_this_machine()
    texts = {
        "doctor.txt": hide(render(found)) + "\n",
        "versions.json": hide(json.dumps(list_versions(), indent=1)) + "\n",
    }
    try:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in texts.items():
                archive.writestr(name, text)
    except OSError as error:
        raise VjobError(f"{path} cannot be written: {error.strerror}") from None
    return list(texts)


def list_versions() -> dict[str, str | dict[str, str]]:
    """Versions of Python, the system, vjob, and the packages that it uses."""
    lines = importlib.metadata.requires("vjob") or ()
    needed = [re.split(r"[ <>=;!~\[]", line)[0] for line in lines if "extra ==" not in line]
    packages = {name: find_version(name) or "not installed" for name in ("vjob", *needed, *EXTRAS)}
    try:
        system = platform.freedesktop_os_release().get("PRETTY_NAME", "not known")
    except OSError:
        system = "not known"
    return {
        "python": sys.version,
        "system": system,
        "kernel": f"{platform.release()} {platform.machine()}",
        "packages": packages,
    }


class Hider:
    """Replaces names of persons and machines, and hides secrets."""

    def __init__(self, words: Mapping[str, str]) -> None:
        """`words` maps each text to its replacement."""
        self._words = dict(sorted(words.items(), key=lambda item: -len(item[0])))

    @classmethod
    def of_this_machine(cls) -> Hider:
        """Return a hider for this user's and this machine's names."""
        name = socket.gethostname()
        words = {str(Path.home()): "~", name: "HOST", name.partition(".")[0]: "HOST"}
        words |= dict.fromkeys(list_addresses(), "ADDRESS")
        with contextlib.suppress(KeyError, OSError):  # A user without a name.
            words[getpass.getuser()] = "USER"
        return cls({word: mask for word, mask in words.items() if word not in NAMES_NOBODY})

    def __call__(self, text: str) -> str:
        for word, mask in self._words.items():
            text = re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", mask, text)
        return withhold(text)

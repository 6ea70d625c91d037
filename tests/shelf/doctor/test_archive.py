"""The archive of `vjob doctor --report` says nothing of who sends it, and has no secret."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from vjob.jobs.errors import VjobError
from vjob.jobs.schedulers.diagnosis import Diagnosis
from vjob.shelf.doctor.archive import Hider, write_archive


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/ada/venv and /home/ada", "~/venv and ~"),
        ("/home/adam/venv", "/home/adam/venv"),
        ("ada@n1.hpc resolves to 10.0.0.7", "USER@HOST resolves to ADDRESS"),
        ("n1 10.0.0.70 radar", "HOST 10.0.0.70 radar"),
        ("proxy http://ada:fish8432@cache:3128", "proxy http://<redacted>@cache:3128"),
        ("export HF_TOKEN=abcdefgh12345678", "export HF_TOKEN=<redacted>"),
    ],
)
def test_names_and_secrets_are_hidden(text: str, shown: str) -> None:
    hide = Hider({
        "/home/ada": "~", "ada": "USER", "n1": "HOST", "n1.hpc": "HOST", "10.0.0.7": "ADDRESS",
    })  # fmt: skip
    assert hide(text) == shown


def test_the_archive_has_the_diagnoses_and_the_versions(tmp_path: Path) -> None:
    found = [
        Diagnosis(name="ports", status="warn", text="61000 is taken", remedy="set cluster.port")
    ]
    path = tmp_path / "report.zip"
    names = write_archive(path, found)
    with zipfile.ZipFile(path) as archive:
        assert archive.namelist() == names == ["doctor.txt", "versions.json"]
        assert (
            archive.read(names[0]).decode()
            == "warn  ports: 61000 is taken\n      set cluster.port\n"
        )
        versions = json.loads(archive.read(names[1]))
    assert versions["packages"]["vjob"] and versions["packages"]["click"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(VjobError, match=r"/report\.zip cannot be written: No such file"):
        write_archive(tmp_path / "missing/report.zip", [])

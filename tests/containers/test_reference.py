"""References as people write them, as enroot takes them, and the names of their files."""

from __future__ import annotations

import pytest

from vjob.containers.reference import BadReference, parse_reference

DIGEST = "sha256:" + "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "enroot", "name"),
    [
        ("debian:12", "docker://debian:12", "docker.io+debian+12"),
        ("docker://debian", "docker://debian:latest", "docker.io+debian+latest"),
        ("library/debian", "docker://debian:latest", "docker.io+debian+latest"),
        ("bitnami/pytorch:2", "docker://bitnami/pytorch:2", "docker.io+bitnami+pytorch+2"),
        (
            "nvcr.io#nvidia/pytorch:25.11-py3",
            "docker://nvcr.io#nvidia/pytorch:25.11-py3",
            "nvcr.io+nvidia+pytorch+25.11-py3",
        ),
        (
            "docker://nvcr.io/nvidia/pytorch:25.11-py3",
            "docker://nvcr.io#nvidia/pytorch:25.11-py3",
            "nvcr.io+nvidia+pytorch+25.11-py3",
        ),
        (
            "docker://$oauthtoken@nvcr.io#nvidia/cuda:13",
            "docker://$oauthtoken@nvcr.io#nvidia/cuda:13",
            "nvcr.io+nvidia+cuda+13",
        ),
        ("localhost:5000/a:1", "docker://localhost:5000#a:1", "localhost_5000+a+1"),
        ("podman://localhost/mine:3", "podman://localhost/mine:3", "podman+localhost+mine+3"),
        ("dockerd://mine", "dockerd://mine:latest", "dockerd+mine+latest"),
        (
            f"quay.io/a/b:1@{DIGEST}",
            f"docker://quay.io/a/b@{DIGEST}",
            f"quay.io+a+b+{DIGEST.replace(':', '-')}",
        ),
    ],
)
def test_a_reference_has_one_name_for_each_use(text: str, enroot: str, name: str) -> None:
    found = parse_reference(text)
    assert found.enroot == enroot
    assert found.file_name == f"{name}.sqsh"
    assert parse_reference(enroot).file_name == found.file_name


@pytest.mark.parametrize(
    "text",
    [
        "",
        "docker://",
        "Upper:1",
        "a b",
        "a:",
        "../x",
        "a:b/c",
        "a@sha256:12",
        "-o",
        "http://x/y",
        "#a",
    ],
)
def test_what_is_none_is_refused(text: str) -> None:
    with pytest.raises(BadReference):
        parse_reference(text)

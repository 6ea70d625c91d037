"""The lanes of the container suite: what they say where nothing can be tried, and their pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import ROOT
from tests.containers import lane
from tests.containers.lane import RESULTS, USER, Shown, parse_report, render, render_quote

REPORT = """\
<testsuites><testsuite name="pytest">
<testcase classname="tests.containers.test_behaviour" name="test_remap_root_shows_root[enroot]"/>
<testcase classname="tests.containers.test_store" name="test_a_full_disk"><failure message="x"/></testcase>
<testcase classname="tests.cluster.test_containers" name="test_ranks_are_right[enroot-split]">
<skipped message="needs root: /usr/bin/x is not for you"/></testcase>
</testsuite></testsuites>
"""  # noqa: E501  as pytest writes it
FACTS = "enroot 4.1.2, Debian GNU/Linux 12, Linux 6.1, Python 3.11.2, x86_64, on 2026-11-24."


def test_a_page_has_a_row_for_each_test_and_a_column_for_each_user(tmp_path: Path) -> None:
    found = parse_report(REPORT)
    assert found == [
        Shown("locally", "remap root shows root (enroot)", "yes"),
        Shown("locally", "a full disk", "FAILED"),
        Shown("on Slurm", "ranks are right (enroot, split)", "needs root: ... is not for you"),
    ]
    text = render("enroot", FACTS, {"as root": found, USER: found[:1]})
    assert "Shown: 1 of 3 as root; 1 of 1 as an ordinary user." in text
    assert "| locally: a full disk | FAILED | not tried |" in text
    page = tmp_path / "container_enroot.md"
    page.write_text(text)
    assert render_quote(page) == (
        "| enroot | enroot 4.1.2 | 2026-11-24 | 1 of 3 as root; 1 of 1 as an ordinary user "
        "| `benchmarks/results/container_enroot.md` |"
    )


@pytest.mark.parametrize("runtime", lane.VERSIONS)
def test_where_the_runtime_is_missing_it_says_so_and_ends_well(
    runtime: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert lane.main([runtime, "--write"]) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"{runtime}: nothing was tried: \S+ is not on the PATH", line)


def test_the_documents_quote_every_page() -> None:
    """`python -c 'from tests.containers.test_lane import *; print(*quote_all(), sep="\\n")'`"""
    rows = [
        line
        for line in (ROOT / "docs/containers.md").read_text().splitlines()
        if "benchmarks/results/container_" in line
    ]
    assert rows == quote_all()


def quote_all() -> list[str]:
    return [render_quote(page) for page in sorted(RESULTS.glob("container_*.md"))]

"""`vjob shell` on runs without a container, and the ways to a node."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command import PROGRAMS, Vjob, read_out, wait_for
from vjob.jobs.errors import InputError
from vjob.jobs.monitor.stacks.shell import choose_node

CONF = """
name: bare
program: {{script: {script}, args: ["-1", hang]}}
cluster: {{scheduler: local, grace_s: 2, nodes: [{{group: m, count: 2, ranks: 1}}]}}
setup: ["export FROM_SETUP=made"]
env: {{NOTE: "it's $HOME"}}
"""


def test_a_command_has_what_the_ranks_of_the_node_have(tmp_path: Path) -> None:
    vjob = Vjob(tmp_path)
    run = vjob.submit(CONF.format(script=PROGRAMS / "fail_as_told.py"))
    wait_for(lambda: read_out(run).count("ready") == 2, 60, lambda: vjob.explain(run))
    words = ("sh", "-c", 'echo "$FROM_SETUP, $NOTE, $VJOB_NODE, ${RANK-none}, $PWD"; exit 7')
    said = vjob("shell", "last", "--node", "1", "--", *words, code=7).stdout
    assert said == f"made, it's $HOME, local1, none, {tmp_path}\n"
    assert "local0, local1" in vjob("shell", "last", "--node", "x9", code=2).stderr
    assert "no-such" in vjob("shell", "last", "--", "no-such", code=2).stderr
    vjob("cancel", "last", "--now")
    said = vjob("shell", "last", code=2).stderr
    assert "is not running: CANCELLED; a shell needs a running job" in said


def test_a_node_goes_by_its_name_or_its_index() -> None:
    hosts = {0: "a1", 1: "b7"}
    assert choose_node(hosts, None) == (0, "a1")
    assert choose_node(hosts, "b7") == choose_node(hosts, "1") == (1, "b7")
    with pytest.raises(InputError, match="a1, b7"):
        choose_node(hosts, "2")

"""`shell`: a command beside the ranks of a node, in their container where they have one.

The command has the environment, working directory and mounts of a rank, but no rank's number. If
the ranks of the node share a container, the command enters that container by the pid of one of
them; if each rank has its own container, the command starts another one of the same kind.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Mapping, NoReturn, Sequence

from varuna_core.agent.meeting.meeting import find_go, find_master
from varuna_core.agent.node import meeting_of
from varuna_core.agent.processes.proc import read_environment
from varuna_core.agent.processes.process import become, own_environment
from varuna_core.agent.setup.container import choose_container, fill_in
from varuna_core.agent.setup.ranks import build_rank
from varuna_core.agent.setup.site import WRONG_INPUT, Refusal, Site, compute_index, host_name
from varuna_core.records.files import read_json
from varuna_core.records.plan import Plan
from varuna_core.records.runfolder import RunFolder

OF_RANK = (
    "RANK", "LOCAL_RANK", "ROLE_RANK", "TORCHELASTIC_ERROR_FILE", "SLURM_PROCID", "SLURM_LOCALID",
    "VJOB_TRACE", "VJOB_STEPS", "VJOB_ENDED", "VJOB_STAGE", "VJOB_REPLICA", "VJOB_TENSOR_RANK",
)  # fmt: skip
ADVICE = (
    "{runtime} cannot start a second process in a container; `nsenter --target {rank} --all` on "
    "the node enters a rank's container if you have the rights"
)
SHELL = ("/bin/sh", "-c", "command -v bash >/dev/null 2>&1 && exec bash; exec sh")


def enter_node(
    run: RunFolder, plan: Plan, number: int, given_index: int | None, words: Sequence[str]
) -> NoReturn:
    """Replace this process with the command, a shell by default; raise Refusal if that fails."""
    node = plan.node(compute_index(plan, given_index, os.environ))
    attempt = run.attempt(number)
    master = find_master(attempt)
    if master is None:
        raise Refusal(WRONG_INPUT, f"attempt {number} has not started yet")
    go = find_go(attempt, master.opened)
    site = Site(
        plan=plan,
        node=node,
        run=run,
        attempt=attempt,
        master=master if go is None else replace(master, hosts=go.hosts),
        host=host_name(plan, node.index, os.environ, os.uname().nodename),
        env=own_environment(),
        stopping=lambda: False,
    )
    site.facts.holder = _find_rank(site)
    container, problems = choose_container(site)
    if problems:
        raise Refusal(WRONG_INPUT, problems[0].text)
    if container is not None and (container.step or container.wraps):
        raise Refusal(WRONG_INPUT, ADVICE.format(runtime=container.runtime, rank=site.facts.holder))
    own = {"TERM": os.environ["TERM"]} if "TERM" in os.environ else {}
    if container is None:  # what `setup` lines and modules made is known to ranks alone
        seen = read_environment(site.facts.holder)
        env = {name: value for name, value in seen.items() if name and name not in OF_RANK}
        _become(tuple(words) or SHELL, {**env, **own}, plan.workdir)
    asked = replace(
        plan,
        command=tuple(words) or SHELL,
        prefix=(),
        prefixed=None,
        timeline=False,
        count_steps=False,
        env={**plan.env, **own},
    )
    # No rank's number: it is not to be taken for one.
    start = build_rank(asked, node, -1 - node.first_rank, meeting_of(site), site.env, container)
    _become(fill_in(start.argv, site, -1), start.env, start.cwd)


def _become(argv: Sequence[str], env: Mapping[str, str], cwd: str) -> NoReturn:
    try:
        become(argv, env, cwd)
    except OSError as error:
        raise Refusal(WRONG_INPUT, f"{error.filename or argv[0]}: {error.strerror}") from error


def _find_rank(site: Site) -> int:
    """Return the pid of a rank that runs here."""
    beat = read_json(site.attempt.beat(site.node.index))
    ranks = beat.get("ranks") if isinstance(beat, dict) else None
    for held in ranks.values() if isinstance(ranks, dict) else ():
        if isinstance(held, dict) and isinstance(held.get("pid"), int):
            return int(held["pid"])
    raise Refusal(WRONG_INPUT, f"no rank runs on {site.host}, node {site.node.index}")

"""`standby`: the agent of the next attempt, started while this one trains, with ranks that wait.

    stay ── starts ──► standby: starts ranks, which import and wait (agent/standby_ranks.py)
         ── {"attempt": 3, "node": 1} ──► the agent of attempt 3, as if started for it
         ── the end of our input ──► goes

It is used by one attempt, or by none.
"""

from __future__ import annotations

import json
import os
import sys

from varuna_core.agent.node import run_node
from varuna_core.agent.processes.process import own_environment
from varuna_core.agent.setup.host import host_name, load_plan
from varuna_core.agent.setup.ranks import Meeting
from varuna_core.agent.standby_ranks import StandbyRanks
from varuna_core.records.plan import Plan
from varuna_core.records.runfolder import RunFolder


def can_wait(plan: Plan) -> bool:
    """Whether ranks of such a plan may wait; not in a container, which is prepared anew each
    time, nor under a profiler."""
    asked = plan.morphing is not None and plan.morphing.warm
    return asked and not plan.containers and not plan.prefix


def stand_by(run: RunFolder, number: int, index: int) -> int:
    """Like node `index` of attempt `number`, until told otherwise; the exit code of the node."""
    plan = load_plan(run, number)
    node = plan.node(index)
    meeting = Meeting(
        run=run.path,
        attempt=number,
        trace=run.attempt(number).trace(0).parent,
        address="",
        port=0,
        interface=None,
        host=host_name(plan, index, os.environ, os.uname().nodename),
    )
    ranks = StandbyRanks()
    ranks.start(plan, node, meeting, own_environment())
    line = sys.stdin.readline()
    if not line.endswith("\n"):  # whoever started us has no use for us any more
        ranks.end()
        return 0
    task = json.loads(line)
    plan = load_plan(run, task["attempt"])
    return run_node(run, plan, task["attempt"], task["node"], standby=ranks)

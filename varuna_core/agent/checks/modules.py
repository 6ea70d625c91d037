"""Check that the ranks' Python finds the modules that the program needs.

The ranks' Python, which may be another one than the agent's, is run once on each node in the
environment and container of the node's first rank. It calls `find_spec` and imports no module, so
that large modules take no longer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import List

from varuna_core.agent.processes.process import run
from varuna_core.agent.setup.container import fill_in
from varuna_core.agent.setup.ranks import RankStart
from varuna_core.agent.setup.site import Site
from varuna_core.records.nodes import FAIL, OK, WARN, Check
from varuna_core.records.plan import Plan

ASK_S = 60.0
ANSWER = "vjob: missing modules:"
_CODE = (
    "import sys; from importlib.util import find_spec; "
    f"print({ANSWER!r}, *[name for name in sys.argv[1:] if find_spec(name) is None])"
)


def build_question(plan: Plan) -> Plan:
    """Return a plan whose ranks print the missing modules instead of running the program."""
    names = [name for name, _ in plan.modules]
    command = (plan.command[0], "-c", _CODE, *names)
    return replace(plan, command=command, prefix=(), prefixed=None)


def check_modules(site: Site, question: RankStart, timeout_s: float = ASK_S) -> List[Check]:
    """Run `question`, a rank of `build_question`'s plan, and return its result as a check."""
    argv = fill_in(question.argv, site, site.node.first_rank)
    done = run(
        argv, timeout_s=timeout_s, env=question.env, cwd=question.cwd, stopping=site.stopping
    )
    answers = [line for line in done.out.splitlines() if line.startswith(ANSWER)]
    if done.code is None or not answers:
        how = f"exited {done.code}" if done.code is not None else f"no answer in {timeout_s:g} s"
        said = (done.err.strip().splitlines() or [""])[-1]
        return [
            Check("modules", WARN, f"the ranks' Python could not be checked: {how} {said}".strip())
        ]
    missing = answers[-1][len(ANSWER) :].split()
    remedies = dict(site.plan.modules)
    if not missing:
        return [Check("modules", OK, f"{', '.join(remedies)} there")]
    what = f"the ranks' Python lacks {' and '.join(missing)}"
    wanted = "; ".join(dict.fromkeys(remedies[name] for name in missing))
    return [Check("modules", FAIL, f"{what}: {wanted}")]

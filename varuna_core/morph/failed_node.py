"""On which node an attempt failed: where a rank ended by itself while the others felt it.

A rank that stops because another one is gone says so; it is fallout. Nobody is blamed where ranks
of several nodes failed by themselves: then it is the program, the data or the file server.
"""

from __future__ import annotations

import re
from typing import Dict, Optional, Sequence

from varuna_core.records.exits import RankExit
from varuna_core.records.plan import Plan

FALLOUT = re.compile(
    r"\b(RankFailed|ChannelClosed|Dist(Network|Store|Backend)?Error|BrokenPipeError"
    r"|ConnectionError|Connection(Reset|Refused|Aborted)Error)\b"
    r"|[Cc]onnection (was )?(closed|reset|refused)|[Bb]roken pipe"
)
"""In the last line of a rank that lost another one: the engine's own words, torch's and gloo's."""


def find_culprit(plan: Plan, exits: Dict[int, RankExit], missing: Sequence[int]) -> Optional[int]:
    """The node's index in the plan of the attempt; `missing` are ranks that left no exit."""
    failed = [item for item in exits.values() if item.code != 0 and not item.stopped]
    own = [item.rank for item in failed if item.signal or not FALLOUT.search(item.last_error)]
    nodes = {plan.node_of_rank(rank).index for rank in own or missing}
    return nodes.pop() if len(nodes) == 1 else None

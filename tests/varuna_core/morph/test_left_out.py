"""A node on which ranks fail again and again, with manager and nodes as real processes."""

from __future__ import annotations

from pathlib import Path

from tests.varuna_core.morph.test_manager import TRAINS, Elastic
from varuna_core.records.plan import read_attempt_plan
from varuna_core.records.record import read_events

BROKEN = '[ "$VJOB_NODE" = n1 ] && { echo "RuntimeError: uncorrectable ECC error" >&2; exit 3; }; '
WAITS = '[ "$VJOB_ATTEMPT" -lt 2 ] && exec sleep 1000; '
"""As long as one of them fails, the others do what ranks do then."""


def test_a_node_on_which_ranks_fail_twice_is_left_out_and_the_rest_trains(tmp_path: Path) -> None:
    elastic = Elastic(tmp_path, BROKEN + WAITS + TRAINS)
    try:
        manager, nodes = elastic.start("manage"), [elastic.stay(index) for index in range(3)]
        code, _, said = elastic.finish(manager)
        assert (code, elastic.answer()) == (0, "0"), said
        assert elastic.finish(nodes[1])[0] == 0
        plan = read_attempt_plan(elastic.run, 2)
        assert plan is not None and plan.num_nodes == 2
        assert [attempt.number for attempt in elastic.run.attempts()] == [0, 1, 2]
        assert "node 1 is left out: its ranks failed in two attempts in a row" in said
        (event,) = [one for one in read_events(elastic.run) if one["kind"] == "left-out"]
        assert "uncorrectable ECC error" in event["reason"]
        assert elastic.read_state().left_out == (event["reason"],)
    finally:
        elastic.end()

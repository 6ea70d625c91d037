"""Which ranks hang, and when that is sure enough to act on."""

from dataclasses import replace

import pytest

from varuna_core.facts.hang import HangWitness, parse_hang
from varuna_core.facts.sentences import describe_hang
from varuna_core.hang.flight import Calls
from varuna_core.hang.judge import find_halted, judge_hang
from varuna_core.hang.signs import NodeSigns, RankSigns, parse_signs, read_signs, write_signs
from varuna_core.records.runfolder import RunFolder

NOW = 1000.0


def calls(*names):
    return {"0": Calls("default_pg", dict(enumerate(names, start=1)))}


def stands(rank, silence_s=60.0, **values):
    """A rank that waits in a collective and shows nothing else."""
    held = {
        "pid": 10 + rank, "state": "S", "silence_s": silence_s, "has_stepped": True,
        "still_s": silence_s - 20, "waits": True, "in_collective": True, "place": "step (t.py:3)",
        "calls": calls("all_reduce", "all_reduce"),
    }  # fmt: skip
    return RankSigns(rank=rank, **{**held, **values})


def starts(rank, silence_s, **values):
    """A rank before its first step, of which no thread of ours tells."""
    held = {"has_stepped": False, "calls": {}, "place": "", "in_collective": False}
    return stands(rank, silence_s, **{**held, **values})


def judge(*ranks, quiet_s=5.0, after_s=None):
    """One rank on each node."""
    nodes = {
        one.rank: NodeSigns(one.rank, f"n{one.rank}", 1, 5.0, (one,), quiet_s) for one in ranks
    }
    return judge_hang(len(ranks), len(ranks), nodes, NOW, after_s)


BEHIND = {"calls": calls("all_reduce")}
OTHER = {"calls": calls("all_reduce", "barrier")}
SLEEPS = {**BEHIND, "in_collective": False, "place": "load (t.py:9)"}
LOADS = {**SLEEPS, "calls": {}}
MUTE = {"is_mute": True, "calls": {}, "in_collective": False, "place": ""}
COMPUTES = {**SLEEPS, "waits": False}


@pytest.mark.parametrize(
    ("ranks", "witness", "rank", "is_due"),
    [
        pytest.param([stands(0), stands(1, **OTHER)], "mismatched", 1, True, id="another one"),
        pytest.param([stands(0), stands(1, **BEHIND)], "silent", 1, False, id="one behind"),
        pytest.param([stands(0, 30), stands(1, 30, **OTHER)], None, None, None, id="too early"),
        pytest.param([stands(0), stands(1, **SLEEPS)], "silent", 1, False, id="sleeps a minute"),
        pytest.param(
            [stands(0, 160), stands(1, 160, **SLEEPS)], "silent", 1, True, id="sleeps too long"
        ),
        pytest.param(
            [stands(0, 160), stands(1, 160), stands(2, 160, **LOADS)],
            "silent", 2, True, id="one has made no call, the others wait",
        ),
        pytest.param(
            [stands(0, 160), stands(1, 160, **LOADS), stands(2, 160, **LOADS)],
            "silent", None, True, id="several have made no call",
        ),
        pytest.param(
            [stands(0, 160), stands(1, 160, **LOADS | {"place": ""})],
            "silent", None, True, id="nobody can tell whether it is in a call",
        ),
        pytest.param([stands(0), stands(1)], "silent", None, False, id="all in the same"),
        pytest.param([stands(0, 160), stands(1, 160)], "silent", None, True, id="and for long"),
        pytest.param(
            [stands(0, 900), stands(1, 900, **COMPUTES)], "spinning", 1, False, id="one evaluates"
        ),
        pytest.param(
            [stands(0, 110), stands(1, 110, **SLEEPS, spins=True)],
            "spinning", 1, True, id="one in a loop that cannot end",
        ),
        pytest.param(
            [stands(0, 900, spins=True), stands(1, 900, **BEHIND, spins=True)],
            "silent", 1, True, id="all in such loops, one behind",
        ),
        pytest.param(
            [stands(0, 500), stands(1, 500, **SLEEPS, prints=True)],
            "silent", 1, False, id="one waits and prints",
        ),
        pytest.param(
            [stands(0, 601), stands(1, 601, **SLEEPS, prints=True)],
            "silent", 1, True, id="and goes on to",
        ),
        pytest.param(
            [stands(0, 900, waits=False), stands(1, 900, waits=False)],
            None, None, None, id="all compute",
        ),
        pytest.param(
            [starts(0, 900), starts(1, 900)],
            None, None, None, id="starts, or counts no steps",
        ),
        pytest.param(
            [starts(0, 130, has_joined=True), starts(1, 130)], "silent", 1, False, id="joins late",
        ),
        pytest.param(
            [starts(0, 140, has_joined=True), starts(1, 140)], "silent", 1, True, id="never joins",
        ),
        pytest.param(
            [starts(0, 590, has_joined=True), starts(1, 590, has_joined=True)],
            "silent", None, False, id="all have joined, and may count no steps",
        ),
        pytest.param(
            [starts(0, 700, has_joined=True), starts(1, 700, waits=False)],
            "spinning", 1, False, id="loads before it joins",
        ),
        pytest.param(
            [stands(0, 900), stands(1, 900, is_watched=True)], None, None, None, id="a debugger",
        ),
        pytest.param(
            [stands(0, 900), stands(1, 0.0)], None, None, None, id="one goes on",
        ),
        pytest.param(
            [stands(0, 900), stands(1, 900, still_s=3.0)], None, None, None, id="it moves",
        ),
        pytest.param([stands(0, 160), stands(1, 160, **MUTE)], "silent", 1, True, id="a mute one"),
        pytest.param(
            [stands(0, 160, **SLEEPS), stands(1, 160, **MUTE)],
            "silent", None, True, id="a mute one, and nobody waits for it",
        ),
    ],
)  # fmt: skip
def test_ranks_that_stand(ranks, witness, rank, is_due):
    found = judge(*ranks)
    if witness is None:
        assert found is None
    else:
        assert (found.hang.witness, found.hang.rank) == (HangWitness(witness), rank)
        assert found.is_due == is_due


@pytest.mark.parametrize(
    ("lost", "seen", "silence_s", "expected"),
    [
        pytest.param({1: "n1"}, (0, 2), 100, ("lost", "n1", True), id="a silent agent"),
        pytest.param({1: "n1"}, (0, 2), 80, ("lost", "n1", False), id="not yet"),
        pytest.param({1: "n1"}, (0, 1, 2), 100, ("lost", "n1", True), id="cut, but it writes"),
        pytest.param({1: "n1"}, (0,), 900, None, id="another one says nothing"),
    ],
)
def test_the_node_that_is_lost_is_the_odd_one(lost, seen, silence_s, expected):
    ranks = [stands(0, silence_s), stands(1, silence_s, **BEHIND), stands(2, silence_s)]
    nodes = {at: NodeSigns(at, f"n{at}", 1, 5.0, (ranks[at],)) for at in seen}
    found = judge_hang(3, 3, nodes, NOW, None, lost)
    assert (found and (found.hang.witness.value, found.hang.node, found.is_due)) == expected


@pytest.mark.parametrize(
    ("quiet_s", "after_s", "is_due"),
    [(5, None, True), (120, None, False), (5, 600, False), (120, 150, True)],
)
def test_a_longer_pause_before_or_the_conf_lengthens_the_limit(quiet_s, after_s, is_due):
    ranks = [stands(0, 170), stands(1, 170, **SLEEPS)]
    assert judge(*ranks, quiet_s=quiet_s, after_s=after_s).is_due == is_due


def test_a_node_that_says_nothing_leaves_it_open():
    node = NodeSigns(0, "n0", 1, 5.0, (stands(0, 900),))
    assert judge_hang(2, 2, {0: node}, NOW, None) is None


@pytest.mark.parametrize(
    ("state", "halted_s", "is_watched", "expected"),
    [
        ("X", 0.1, False, None),  # it has just ended, and its agent has not reaped it yet
        ("Z", 5.0, False, None),
        ("T", 31.0, False, (HangWitness.STOPPED, True)),
        ("Z", 31.0, False, (HangWitness.DEAD, True)),
        ("T", 5.0, False, (HangWitness.STOPPED, False)),
        ("T", 900.0, True, None),
        ("S", 0.0, False, None),
    ],
)
def test_a_stopped_rank_is_seen_by_its_own_agent(state, halted_s, is_watched, expected):
    one = stands(1, state=state, halted_s=halted_s, is_watched=is_watched)
    found = find_halted([stands(0), one], "n1", NOW)
    assert (found and (found.hang.witness, found.is_due)) == expected


def test_a_stopped_process_below_a_rank_is_not_called_the_rank():
    one = stands(1, state="T", halted_s=31.0, below=77)
    said = describe_hang(find_halted([one], "n1", NOW).hang)
    assert said == "process 77, which rank 1 on n1 started, is stopped (SIGSTOP) at step (t.py:3)"


@pytest.mark.parametrize(
    ("ranks", "sentence"),
    [
        (
            [stands(0), stands(1, **OTHER)],
            "rank 0 called all_reduce 2, rank 1 on n1 called barrier instead at step (t.py:3)",
        ),
        (
            [stands(0), stands(1, **SLEEPS), stands(2)],
            "ranks 0, 2 called all_reduce 2, rank 1 on n1 did not, and waits at load (t.py:9)",
        ),
        (
            [stands(0), stands(1)],
            "no rank is active at step (t.py:3); the last collective all called is all_reduce 2",
        ),
        (
            [stands(0), stands(1, **MUTE)],
            "rank 1 on n1 does not answer, as native code holds the GIL; the other ranks wait "
            "in collectives; the last collective called is all_reduce 2",
        ),
    ],
)
def test_one_sentence_names_the_collective_and_the_ranks(ranks, sentence):
    hang = judge(*ranks).hang
    assert describe_hang(hang) == sentence
    assert parse_hang(hang.as_json()) == hang


def test_signs_come_back_from_their_file(tmp_path):
    attempt = RunFolder(tmp_path).attempt(0)
    attempt.make()
    signs = NodeSigns(1, "n1", 3, 5.0, (stands(2), replace(stands(3), calls={})))
    write_signs(attempt, signs)
    assert read_signs(attempt, 2) == {1: signs}
    assert parse_signs({"index": 1}) is None

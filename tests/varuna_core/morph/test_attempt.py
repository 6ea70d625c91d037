"""Which nodes an attempt takes where their memory holds the training; and what it begins with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.varuna_core.agent.local_run import make_group, make_plan
from tests.varuna_core.morph.test_messages import ME
from tests.varuna_core.programs.trainings import GPT
from varuna_core.morph.attempt import make_attempt, pick_nodes
from varuna_core.morph.messages import Start
from varuna_core.morph.orders import write_presence
from varuna_core.records.memory_copies import find_whole
from varuna_core.records.plan import MorphPlan, Plan, read_plan
from varuna_core.records.record import read_events
from varuna_core.records.runfolder import RunFolder
from varuna_core.records.training import find_facts, read_training, render_training

OLD, NEW = "varuna_ckpt_40.0.8.partial", "varuna_ckpt_45.0.9.partial"
WORDS = [f"{copy}/{index}-of-2" for copy in (OLD, NEW) for index in range(2)]
LIMITS = MorphPlan(min_nodes=1, max_nodes=6, requeue=False, save_s=5, memory=True)
TRAINING = replace(GPT, pipeline=2)
FACTS = find_facts(TRAINING)


def build_plan(first: int, second: int) -> Plan:
    """Two stages on nodes of two groups."""
    groups = [make_group("first", first, 1)]
    groups += [make_group("second", second, 1, first_node=first, first_rank=first)]
    total = first + second
    return make_plan(*groups, pipeline=2, data=total // 2, morph=True, morphing=LIMITS)


@given(st.lists(st.lists(st.sampled_from(WORDS), max_size=3), min_size=6, max_size=6), st.data())
def test_others_of_the_same_groups_are_taken_where_they_make_a_copy_whole(
    held: list[list[str]], data: st.DataObject
) -> None:
    plan = build_plan(4, 2)
    names = [f"{seat}/k" for seat in range(6)]
    nodes = data.draw(st.lists(st.sampled_from(names), unique=True, min_size=2))
    has = {name: words for name, words in zip(names, held, strict=True) if name in nodes}
    plain, picked = pick_nodes(plan, FACTS, nodes, {}), pick_nodes(plan, FACTS, nodes, has)

    def groups(some: tuple[str, ...]) -> list[str]:
        return sorted(plan.node(int(name[0])).group.name for name in some)

    assert set(picked) <= set(nodes) and groups(picked) == groups(plain)
    assert list(picked) == sorted(picked)
    wanted = find_whole(has)
    if wanted is not None and find_whole({n: has[n] for n in plain}) == wanted:
        assert find_whole({n: has[n] for n in picked}) == wanted
    if wanted is None:
        assert picked == plain


def test_a_spare_node_that_has_the_only_copy_of_a_stage_is_taken() -> None:
    plan, nodes = build_plan(4, 0), ["0/k", "1/k", "2/k"]
    held = {"0/k": [WORDS[2]], "1/k": [WORDS[2]], "2/k": [WORDS[3]]}
    assert pick_nodes(plan, FACTS, nodes, {}) == ("0/k", "1/k")
    assert pick_nodes(plan, FACTS, nodes, held) == ("0/k", "2/k")


def begin(folder: Path, held: dict[int, tuple[str, ...]], whole: int) -> RunFolder:
    run = RunFolder(folder / f"run{whole}")
    run.path.mkdir()
    run.morph.make()
    run.training.write_text(render_training(TRAINING))
    for seat, words in held.items():
        write_presence(run.morph, replace(ME, seat=seat, held=words))
    start = Start(1, tuple(f"{seat}/{ME.key}" for seat in range(2)))
    make_attempt(run, build_plan(2, 0), FACTS, start, ME.session, whole=whole, saved=whole)
    return run


def test_an_attempt_begins_with_what_its_own_nodes_hold_if_that_is_newer(tmp_path: Path) -> None:
    held = {0: (WORDS[0], WORDS[2]), 1: (WORDS[1],), 4: (WORDS[3],)}
    for whole, copy in ((-1, OLD), (39, OLD), (40, None), (45, None)):
        run = begin(tmp_path, held, whole)
        training = read_training(run.attempt(1).training)
        assert (training.from_memory, training.saved) == (copy, whole)
        told = [(e["iteration"], e["nodes"], e["attempt"]) for e in read_events(run)]
        assert told == ([(40, [0, 1], 1)] if copy else [])


def test_a_script_hears_what_its_run_has_saved(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.morph.make()
    own = replace(FACTS, program="script")
    for attempt, saved in ((1, -1), (2, 40)):
        start = Start(attempt, tuple(f"{seat}/{ME.key}" for seat in range(2)))
        make_attempt(run, build_plan(2, 0), own, start, ME.session, whole=-1, saved=saved)
    plans = [read_plan(run.attempt(attempt).plan) for attempt in (1, 2)]
    assert [plan and plan.env.get("VJOB_SAVED") for plan in plans] == [None, "40"]

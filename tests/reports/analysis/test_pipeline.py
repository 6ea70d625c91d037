"""Bubbles, critical paths and balance of steps whose answers are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.jobs.confs import make_conf
from tests.reports.traces import MS, write_rank, write_simulated
from varuna_core.facts.known import NotKnown
from varuna_core.facts.not_covered import Lack, NotCovered
from varuna_core.facts.partition import Partition
from varuna_core.schedule.compiled import simulate
from varuna_core.schedule.costs import Costs, build_even_costs
from varuna_core.schedule.registry import build_schedule
from vjob.jobs.conf.loading.check_layout import check_partition
from vjob.reports.analysis.balance import suggest_partition
from vjob.reports.analysis.findings import Finding, find_all
from vjob.reports.analysis.measures import Analysis, analyse
from vjob.reports.load.tables import Job, load_job, read_plan_facts


def read(folder: Path) -> tuple[Job, Analysis]:
    job = load_job(folder)
    return job, analyse(job)


def test_equal_stages_have_the_bubble_of_the_books(tmp_path: Path) -> None:
    """(p - 1) / (m + p - 1), and nothing left to gain."""
    schedule = build_schedule("1f1b", 4, 6)
    write_simulated(tmp_path, schedule, build_even_costs(4))
    _, analysis = read(tmp_path)
    median = analysis.find_step("median")
    assert median is not None and median.trouble == ""
    (bubbles,) = median.bubbles
    assert bubbles.measured == pytest.approx(3 / 9)
    assert bubbles.ideal == pytest.approx(3 / 9)
    assert bubbles.ideal_even == pytest.approx(3 / 9)
    assert analysis.bubbles["bubble_share"].tolist() == pytest.approx([3 / 9] * 3)
    assert analysis.paces is not None
    assert analysis.paces.work_s == pytest.approx([0.018] * 4)


def test_a_slow_stage_sets_the_pace_and_is_named(tmp_path: Path) -> None:
    costs = Costs(forward=(1, 1, 3, 1), input_grad=(1, 1, 3, 1), weight_grad=(1, 1, 3, 1))
    schedule = build_schedule("1f1b", 4, 6)
    write_simulated(tmp_path, schedule, costs, partition="2-2-5-2", steps=(10, 20, 30, 40))
    job, analysis = read(tmp_path)
    median = analysis.find_step("median")
    assert median is not None
    (bubbles,) = median.bubbles
    timing = simulate(schedule, costs)
    assert bubbles.measured == pytest.approx(timing.bubble_share)
    assert bubbles.makespan_s == pytest.approx(timing.makespan / 1000)
    even = simulate(schedule, build_even_costs(4, 1.5, 1.5, 1.5))
    assert bubbles.ideal_even == pytest.approx(even.bubble_share)
    # Six micro-batches through stage 2, and what one of them needs before and after it.
    path = {what: 0.0 for what in ("work", "message", "gap")}
    for piece in median.path:
        path[piece.what] += piece.seconds
    assert path["message"] == path["gap"] == 0
    assert path["work"] == pytest.approx(timing.makespan / 1000)
    on_two = sum(piece.seconds for piece in median.path if piece.stage == 2)
    assert on_two == pytest.approx(6 * 9 / 1000)
    sentences = [finding.sentence for finding in find_all(job, analysis)]
    (pace,) = [sentence for sentence in sentences if "sets the pace" in sentence]
    assert pace.startswith(
        "Stage 2 sets the pace: it works 54 ms per step, the median of 3 (half of them 54 ms to "
        "54 ms), 100 % more"
    )


@pytest.mark.parametrize(
    ("work", "num_micro", "said", "key"),
    [
        ((1, 5), 4, "if messages took no time, and 20 % if the stages also", "partition"),
        ((2, 1), 2, "31 % if messages took no time, and no less if the stages", "batch_size"),
    ],
)
def test_equal_stages_are_advised_where_they_would_help(
    tmp_path: Path, work: tuple[int, int], num_micro: int, said: str, key: str
) -> None:
    """Equal stages were said to idle for 26 % instead of 24, and another batch to help unequal
    ones."""
    costs = Costs(forward=work, input_grad=work, weight_grad=work)
    schedule, steps = build_schedule("1f1b", 2, num_micro), (10, 20, 30, 40)
    write_simulated(tmp_path, schedule, costs, steps=steps, partition="4-4")
    (found,) = [finding for finding in find_all(*read(tmp_path)) if finding.rule == "idle"]
    assert said in found.sentence
    assert key in found.key


@pytest.mark.parametrize(
    ("works", "said"),
    [
        # In the step nearest to the median stage 0 works longest, and in all others stage 1.
        ([(1, 2)] * 4 + [(2.5, 1)] + [(1, 3)] * 4, "Stage 1 sets the pace: it works"),
        ([(1, 2), (2, 1)] * 4, "Which stage sets the pace is not known, for the steps disagree"),
        ([(1, 3)] * 2, "Too few steps (2) to know which stage sets the pace."),
    ],
)
def test_the_stage_that_sets_the_pace_is_that_of_most_steps(
    tmp_path: Path, works: list[tuple[float, float]], said: str
) -> None:
    """One step decided, and named stage 0 where stage 1 worked 92.7 ms against 68.6."""

    def build_costs(step: int, replica: int) -> Costs:
        work = [(9, 1), *works][step]
        return Costs(forward=work, input_grad=work, weight_grad=work)

    schedule, steps = build_schedule("1f1b", 2, 4), range(len(works) + 1)
    write_simulated(tmp_path, schedule, build_costs, steps=steps, partition="4-4")
    job, analysis = read(tmp_path)
    median = analysis.find_step("median")
    assert median is not None and (median.step == 5 or len(works) != 9)
    (found,) = [finding for finding in find_all(job, analysis) if finding.rule == "pace"]
    assert found.sentence.startswith(said)
    assert bool(found.key) == bool(found.weight) == said.startswith("Stage 1")


# The embedding is a segment too, and takes much less time than a block.
@pytest.mark.parametrize(
    ("work", "partition"), [((3, 4), "4-3"), ((5, 2), "5-2"), ((2, 2, 4), "1-2-2")]
)
def test_segments_of_a_port_are_not_taken_to_be_alike(
    tmp_path: Path, work: tuple[int, ...], partition: str
) -> None:
    costs = Costs(forward=work, input_grad=work, weight_grad=work)
    schedule = build_schedule("1f1b", len(work), 4)
    steps = (10, 20, 30, 40)
    write_simulated(tmp_path / "attempt-0", schedule, costs, partition=partition, steps=steps)
    plan: dict[str, Any] = {"pipeline": len(work), "partition": partition, "program": "script"}

    def find(**more: Any) -> Finding:
        (tmp_path / "plan.json").write_text(json.dumps(plan | more))
        (tmp_path / "record.json").write_text("{}")
        job, analysis = read(tmp_path)
        assert analysis.suggestion is None
        found = {finding.rule: finding for finding in find_all(job, analysis)}
        assert "partition" not in found
        keys = [finding.key for finding in found.values()]
        assert not [key for key in keys if "parallel.order" in key]
        return found["pace"]

    assert (
        find().key
        == "parallel.partition, by `vjob plan CONF --set parallel.partition=auto --profile FILE`"
    )
    planned = {"step_s": 0.1, "stage_s": [0.04] * len(work)}
    assert find(prediction=planned).key == ""
    guessed = NotCovered(Lack.ESTIMATE, "A100", NotKnown("never measured")).as_json()
    assert find(prediction=planned | {"not_covered": [guessed]}).key
    assert find(prediction=planned | {"stage_s": [0.04] * 9}).key, "of another layout"


def test_messages_that_take_time_are_exposed_communication(tmp_path: Path) -> None:
    """Two stages, one micro-batch, hops of 2: each rank waits once for a message under way."""
    costs = build_even_costs(2, hop=2.0)
    write_simulated(tmp_path, build_schedule("1f1b", 2, 1), costs)
    _, analysis = read(tmp_path)
    median = analysis.find_step("median")
    assert median is not None
    table = median.communication.set_index("rank")
    assert table.loc[0, "exposed_s"] == pytest.approx(0.002)
    assert table.loc[1, "exposed_s"] == pytest.approx(0.002)
    assert table.loc[1, "bubble_s"] == pytest.approx(0.001)
    assert table.loc[0, "bubble_s"] == pytest.approx(0.005 - 0.0)
    (bubbles,) = median.bubbles
    assert bubbles.ideal == pytest.approx(1 / 2)
    assert bubbles.measured == pytest.approx(1 - 6 / 20)
    whats = "work message work work message work"
    assert [piece.what for piece in median.path] == whats.split()


def test_communication_beside_work_is_hidden_and_the_rest_exposed(tmp_path: Path) -> None:
    events = [
        ("B", 1, 0, 0, 0, 0, 10 * MS, 0, ""),
        ("all-reduce", 1, 0, -1, 6 * MS, 0, 10 * MS, 4096, "gradients"),
        ("B", 1, 0, 1, 12 * MS, 0, 2 * MS, 0, ""),
    ]
    write_rank(tmp_path, 0, events)
    _, analysis = read(tmp_path)
    (row,) = analysis.steps[0].communication.to_dict("records")
    assert row["overlapped_s"] == pytest.approx(0.004 + 0.002)
    assert row["exposed_s"] == pytest.approx(0.004)


@given(
    name=st.sampled_from(["gpipe", "1f1b", "varuna", "zero_bubble"]),
    stages=st.integers(1, 4),
    microbatches=st.integers(1, 6),
    costs=st.lists(st.tuples(*[st.integers(1, 9)] * 3), min_size=4, max_size=4),
    shift=st.integers(-(10**12), 10**12),
)
@settings(max_examples=25, deadline=None)
def test_any_simulated_step_is_read_back_as_it_was(
    name: str,
    stages: int,
    microbatches: int,
    costs: list[tuple[int, int, int]],
    shift: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Whatever the schedule, and however far the nodes' clocks are apart."""
    forward, inputs, weights = zip(*costs[:stages], strict=True)
    given_costs = Costs(forward=forward, input_grad=inputs, weight_grad=weights)
    schedule = build_schedule(name, stages, microbatches, costs=given_costs)
    folder = tmp_path_factory.mktemp("job")
    write_simulated(
        folder, schedule, given_costs, steps=(1,), hosts=("a", "b"), shifts_ns=(0, shift)
    )
    _, analysis = read(folder)
    (step, *_) = analysis.steps
    timing = simulate(schedule, given_costs)
    (bubbles,) = step.bubbles
    assert bubbles.measured == pytest.approx(timing.bubble_share, abs=1e-6)
    assert bubbles.ideal == pytest.approx(timing.bubble_share, abs=1e-6)
    (pipeline,) = step.pipelines
    assert pipeline.schedule.ranks == schedule.ranks
    assert sum(piece.seconds for piece in step.path) == pytest.approx(timing.makespan / 1000)
    assert all(piece.what == "work" for piece in step.path)


def test_interleaved_stages_find_their_ranks(tmp_path: Path) -> None:
    schedule = build_schedule("interleaved", 2, 4, stages_per_rank=2)
    write_simulated(tmp_path, schedule, build_even_costs(4))
    _, analysis = read(tmp_path)
    (bubbles,) = analysis.steps[0].bubbles
    assert bubbles.ideal == pytest.approx(simulate(schedule, build_even_costs(4)).bubble_share)
    assert analysis.paces is not None and len(analysis.paces.work_s) == 4


def test_a_rank_that_wrote_nothing_is_said_not_guessed(tmp_path: Path) -> None:
    write_simulated(tmp_path, build_schedule("1f1b", 3, 4), build_even_costs(3))
    (tmp_path / "trace" / "1.jsonl").unlink()
    job, analysis = read(tmp_path)
    assert analysis.steps[0].bubbles == ()
    assert "no rank recorded stage 1" in analysis.steps[0].trouble
    assert any("cannot be analysed" in finding.sentence for finding in find_all(job, analysis))


def test_a_clock_that_is_plainly_wrong_is_put_right_and_named(tmp_path: Path) -> None:
    """Two hours off and no offset measured: the bubble is that of the other ranks' clocks."""
    write_simulated(
        tmp_path,
        build_schedule("1f1b", 2, 4),
        build_even_costs(2),
        hosts=("a", "b"),
        shifts_ns=(0, 7200 * 1000 * MS),
    )
    for path in (tmp_path / "trace").glob("*"):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if '"offset"' not in line))
    job, analysis = read(tmp_path)
    (bubbles,) = analysis.steps[0].bubbles
    # The last rank ends a backward before the first does: that much is not known.
    assert bubbles.measured == pytest.approx(1 / 5, abs=0.15)
    assert any("clock of b is ahead by 2 h" in item.sentence for item in find_all(job, analysis))


def test_ranks_that_drift_apart_have_no_wrong_clock(tmp_path: Path) -> None:
    """A script whose ranks never meet: each step of the second one takes twice as long."""
    for rank, took in enumerate((20, 40)):
        begins = [(step, step * took * MS) for step in range(50)]
        events = [("F", step, 0, 0, at, 0, took * MS, 0, "") for step, at in begins]
        path = write_rank(tmp_path, rank, events, replica=rank, host=f"n{rank}")
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if '"offset"' not in line))
    job, analysis = read(tmp_path)
    assert [trace.shifted_ns for trace in job.traces.ranks] == [0, 0]
    assert not any("The clock of" in item.sentence for item in find_all(job, analysis))


def test_a_partition_is_suggested_only_where_it_helps() -> None:
    assert suggest_partition((4, 4), (1.0, 1.0), head=0) is None
    found = suggest_partition((8, 8), (1.0, 3.0), head=0)
    assert found is not None and str(found) == "12-4"
    assert found.slowest_then_s == pytest.approx(1.5)
    assert found.gain == pytest.approx(0.5)
    # The last stage has no layers and yet its loss: nothing is moved there.
    kept = suggest_partition((6, 2, 0), (6.0, 2.0, 5.0), head=0)
    assert kept is not None and kept.partition.counts == (4, 4, 0)


def test_an_embedding_and_a_head_are_no_layers() -> None:
    """All layers take 1 s, and the head takes 3 s."""
    assert suggest_partition((4, 1), (4.0, 4.0), head=3) is None
    found = suggest_partition((3, 4), (3.0, 7.0), head=3)
    assert found is not None and (str(found), found.slowest_then_s) == ("5-2", pytest.approx(5))
    # If the head is not known, it may be anything: the stages at the ends give no layers away.
    assert suggest_partition((3, 4), (3.0, 7.0), head=None) is None
    found = suggest_partition((3, 6, 2), (3.0, 6.0, 2.4), head=None)
    assert found is not None and (str(found), found.slowest_then_s) == ("4-4-3", pytest.approx(4))


@given(st.data())
@settings(deadline=None)
def test_a_suggested_partition_is_one_that_submit_accepts(data: st.DataObject) -> None:
    """Whichever way the conf counts: blocks alone, or the embedding and the head with them."""
    stages = data.draw(st.integers(2, 6))
    blocks = data.draw(st.lists(st.integers(0, 9), min_size=stages, max_size=stages))
    layers = max(1, sum(blocks))
    blocks[0] += layers - sum(blocks)
    counts = Partition(blocks)
    if data.draw(st.booleans()):
        counts = counts.with_ends(layers + 2)
    work_s = data.draw(st.lists(st.floats(0.01, 9), min_size=stages, max_size=stages))
    found = suggest_partition(counts.counts, work_s, data.draw(st.sampled_from((None, 0, 2.5))))
    if found is not None:
        parallel = f'parallel: {{pipeline: {stages}, partition: "{found}", schedule: 1f1b}}'
        conf = f"""
name: advised
program: pretrain_gpt
model: {{layers: {layers}, hidden: 8, heads: 2, sequence: 8, vocab: 64}}
data: {{prefix: text}}
train: {{steps: 1, global_batch_size: {stages}, micro_batch_size: 1}}
{parallel}
cluster: {{walltime_min: 5, nodes: [{{group: all, count: {stages}, ranks: 1}}]}}
"""
        assert list(check_partition(make_conf(conf))) == [], conf


def test_the_report_counts_stages_as_the_log_does(tmp_path: Path) -> None:
    """Of a model with six blocks a plan has 1-2-5, its log `PARTITION: 0-2-4`."""
    (tmp_path / "plan.json").write_text('{"partition": "1-2-5", "pipeline": 3}')
    (tmp_path / "training.json").write_text('{"layers": 6}')
    facts = read_plan_facts(tmp_path / "plan.json")
    assert facts.partition == Partition.parse("0-2-4") and ("partition", "0-2-4") in facts.shown


def test_steps_of_all_ranks_are_looked_at_and_the_layout_is_that_of_their_attempt(
    tmp_path: Path,
) -> None:
    """The first attempt's last stage was killed before it wrote anything; three stages went on."""
    for number, stages in ((0, 4), (1, 3)):
        folder = tmp_path / f"attempt-{number}"
        slow = (3,) + (1,) * (stages - 1)
        costs = Costs(forward=slow, input_grad=slow, weight_grad=slow)
        write_simulated(folder, build_schedule("1f1b", stages, 6), costs, steps=(1, 2, 3, 4))
        partition = "-".join(["2"] * (stages - 1) + ["3"])
        (folder / "n0.out").write_text(f"0: NODE_RANK: 0\n0: PARTITION: {partition}\n")
    killed = tmp_path / "attempt-0/trace/3.jsonl"
    killed.write_text(killed.read_text().splitlines(keepends=True)[0])
    (tmp_path / "plan.json").write_text('{"pipeline": 4, "partition": "2-2-2-3"}')
    (tmp_path / "record.json").write_text("{}")
    job, analysis = read(tmp_path)
    assert {pair[0] for pair in job.chosen.values()} == {"1"}
    assert analysis.partition == (2, 2, 3)
    keys = [finding.key for finding in find_all(job, analysis)]
    assert not [key for key in keys if key.startswith("parallel.partition")]
    (tmp_path / "plan.json").write_text('{"pipeline": 3, "partition": "2-2-3"}')
    keys = [finding.key for finding in find_all(*read(tmp_path))]
    assert len([key for key in keys if key.startswith("parallel.partition")]) == 1
    assert analyse(load_job(tmp_path / "attempt-0")).partition == (2, 2, 2, 3)


def test_a_rank_of_which_nothing_is_left_hides_no_step(tmp_path: Path) -> None:
    write_simulated(tmp_path, build_schedule("1f1b", 4, 6), build_even_costs(4), steps=(1, 2, 3))
    lost = tmp_path / "trace/3.jsonl"
    lost.write_text(lost.read_text().splitlines(keepends=True)[0])
    job, _ = read(tmp_path)
    assert job.chosen["last"] == ("", 3)

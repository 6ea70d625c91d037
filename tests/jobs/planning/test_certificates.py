"""Certificates of whole answers: the classes that were searched, one gap, and the time kept."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from varuna_core.planner.result.refusal import search_or_explain
from varuna_core.planner.search.deadline import within
from vjob.jobs.conf.loading.load import read_conf
from vjob.jobs.planning.question import PlanOptions, Question, load_question
from vjob.shelf.commands.cli import cli

CONF = """
name: mixed
program: pretrain_gpt
model: {{layers: {layers}, hidden: {hidden}, heads: 16, vocab: 50304}}
data: {{synthetic: true}}
train: {{micro_batch_size: auto, global_batch_size: {batch}, precision: fp16}}
parallel: {{pipeline: auto, data: auto, partition: auto}}
cluster:
  nodes:
    - {{group: strong, count: 1, gpus: "a100:{gpus}"}}
    - {{group: weak, count: {weak}, gpus: "a10:{gpus}"}}
"""
SMALL = {"layers": 8, "hidden": 1024, "batch": 16, "gpus": 1, "weak": 3}
"""One fast GPU and three slow ones: alone it beats every pipeline with one stage a rank."""
SEED = {"layers": 24, "hidden": 1024, "batch": 32, "gpus": 4, "weak": 7}
"""Four GPUs a node, as many ranks as layers: several stages a rank are faster than the bound of
one."""


def write_conf(folder: Path, **sizes: int) -> Path:
    path = folder / "conf.yaml"
    path.write_text(CONF.format(**sizes))
    return path


def plan(path: Path, *args: str) -> str:
    done = CliRunner().invoke(cli, ["plan", str(path), "--link", "1.25", *args])
    assert done.exit_code == 0, done.output
    return done.stdout


def read(path: Path, *args: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(plan(path, "--json", *args))
    return found


def test_a_free_search_finds_what_a_fixed_one_finds(tmp_path: Path) -> None:
    """It said "no plan in this space is faster, gap 0 %" of one stage, and had tried no plan with
    several stages a rank, one of which was faster."""
    path = write_conf(tmp_path, **SMALL)
    words = ("parallel.pipeline=4", "parallel.data=1", "train.micro_batch_size=2")
    fixed = read(path, *itertools.chain.from_iterable(("--set", word) for word in words))
    free = read(path)
    best = free["plans"][0]
    assert best["step_s"] <= fixed["plans"][0]["step_s"]
    assert best["stages"] > best["pipeline"]
    certificate = free["certificate"]
    assert certificate["bound_s"] <= best["step_s"]
    assert certificate["gap"]["value"] == pytest.approx(1 - certificate["bound_s"] / best["step_s"])
    searched = [one for one in certificate["classes"] if one["coverage"] != "not"]
    classes = {tuple(one["schedules"]): one for one in searched}
    assert classes["1f1b", "gpipe", "varuna"]["coverage"] == "wholly"
    assert classes["interleaved", "zbv"]["of"] >= classes["interleaved", "zbv"]["done"] > 0


def test_no_bound_contradicts_the_plan_that_is_printed(tmp_path: Path) -> None:
    """A plan of 0.73 s stood above "none in this space can take less than 0.98 s"."""
    path = write_conf(tmp_path, **SEED)
    text = plan(path, "--limit", "4")
    head = next(line for line in text.splitlines() if " s a step" in line)
    step_s = float(head.split()[0])
    bounds = re.findall(r"(?:can\s+take\s+less|is\s+faster)\s+than\s+([0-9.]+)\s+s", text)
    assert len(bounds) == 1 and float(bounds[0]) <= step_s
    assert "one stage a rank (" in text and "stages a rank (" in text


def load(path: Path) -> Question:
    conf = read_conf(path, environ={})
    keys = ("cluster.nodes",)
    return load_question(conf, keys, path.parent, PlanOptions(prices={}, link_gb_s=1.25))


@pytest.mark.parametrize("sizes", [SMALL, SEED])
def test_a_search_asks_the_clock_until_its_time_is_up_and_ends(
    tmp_path: Path, sizes: dict[str, int]
) -> None:
    """A limit of 60 s took 94: what followed the search, and moves of many stages, never asked."""
    question = load(write_conf(tmp_path, **sizes))
    ticks = itertools.count()
    searched = search_or_explain(
        question.profile,
        question.training,
        question.cluster,
        question.wishes,
        deadline=within(100.0, lambda: float(next(ticks))),
    )
    assert next(ticks) <= 110
    assert {one.why.value for one in searched.classes if one.why is not None} >= {"time"}
    assert searched.bound_s <= searched.best.step_s

"""The list of public launch scripts is well formed, and answers are judged by it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import PurePath
from typing import Any

import pytest

from benchmarks.launch_scripts import (
    FRESH,
    NUM_SCRIPTS,
    LaunchScript,
    Start,
    group_words,
    hash_words,
    read_scripts,
    split_scripts,
)
from benchmarks.launch_scripts.judge import Verdict, judge_conf, judge_counts, judge_refusal
from vjob.shelf.importers.refusal import Refusal

SCRIPTS = read_scripts()


@pytest.mark.parametrize("script", [*SCRIPTS, *read_scripts(FRESH)], ids=lambda script: script.name)
def test_a_script_names_its_file_and_what_is_right(script: LaunchScript) -> None:
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", script.repository)
    assert all(re.fullmatch(r"[0-9a-f]{40}", one) for one in (script.commit, script.blob))
    assert not any(PurePath(path).is_absolute() for path in (script.path, *script.beside))
    assert script.starts or script.refusal
    assert script.refusal in (None, *(one.name.lower() for one in Refusal))
    for start in script.starts:
        assert start.kind in ("script", "module", "command")
        assert "/" not in start.program and re.fullmatch(r"[0-9a-f]{64}", start.sha256)
        assert all(0 <= place < start.words for place in start.masked)


def test_there_are_80_scripts_of_50_repositories_in_halves_that_stay_as_drawn() -> None:
    halves = split_scripts(SCRIPTS)
    assert len({one.name for one in SCRIPTS}) == len(SCRIPTS) == NUM_SCRIPTS
    assert len({one.repository for one in SCRIPTS}) >= 50
    assert [len(half) for half in halves] == [NUM_SCRIPTS // 2] * 2
    assert [one.name for one in halves[0]][:3] == ["accelerate-fsdp", "audiocraft", "biogpt"]


def test_the_second_list_is_of_other_repositories() -> None:
    fresh = read_scripts(FRESH)
    assert len({one.repository for one in fresh}) == len(fresh) >= 15
    assert not {one.repository for one in fresh} & {one.repository for one in SCRIPTS}


@pytest.mark.parametrize(
    ("expected", "reasons", "verdict"),
    [
        ("arguments", {Refusal.ARGUMENTS, Refusal.VARIABLES}, Verdict.REFUSED),
        ("arguments", {Refusal.NOTHING}, Verdict.OTHER_REASON),
        (None, {Refusal.ARGUMENTS}, Verdict.REFUSED_WRONGLY),
    ],
)
def test_a_refusal_is_judged_by_its_reason(
    expected: str | None, reasons: set[Refusal], verdict: Verdict
) -> None:
    assert judge_refusal(replace(SCRIPT, refusal=expected), reasons) is verdict


WORDS = ("--lr", "1e-3", "--out", "@", "--min", "-1")
SCRIPT = LaunchScript(
    name="a",
    repository="a/b",
    path="run.sh",
    commit="",
    blob="",
    launcher="torchrun",
    ranks=4,
    nodes=2,
    starts=(
        Start(kind="script", program="train.py", words=6, masked=(3,), sha256=hash_words(WORDS)),
    ),
)
ARGS = ["--lr", "1e-3", "--out", "/home/me", "--min", "-1"]
LINE = "cd src; torchrun --nproc-per-node 4 train.py --lr 1e-3 --out $HOME --min -1"


@pytest.mark.parametrize(
    ("conf", "verdict"),
    [
        ({"program": {"script": "src/train.py", "args": ARGS}}, Verdict.RIGHT),
        ({"program": {"command": ["torchrun", "train.py", *ARGS]}}, Verdict.RIGHT),
        ({"program": {"command": ["bash", "-c", LINE]}}, Verdict.RIGHT),
        ({"program": {"script": "train.py", "args": ARGS[:-1]}}, Verdict.WORDS),
        ({"program": {"script": "train.py", "args": [*ARGS, "&"]}}, Verdict.WORDS),
        ({"program": {"module": "src"}}, Verdict.WRONG),
        ({"program": {"script": "pretrain.py", "args": ARGS}}, Verdict.INVENTED),
        ({"program": {"script": "train.py", "args": ARGS}, "model": "gpt2-xl"}, Verdict.INVENTED),
        ({"model": "gpt2-small"}, Verdict.INVENTED),
        ({"program": {"megatron": "."}}, Verdict.INVENTED),
    ],
)
def test_a_conf_is_judged(conf: dict[str, Any], verdict: Verdict) -> None:
    assert judge_conf(SCRIPT, conf, LINE)[0] is verdict


def test_a_conf_of_a_script_that_is_to_be_refused_is_taken() -> None:
    script = replace(SCRIPT, starts=(), refusal="several")
    assert judge_conf(script, {"program": {"script": "train.py"}}, LINE)[0] is Verdict.TAKEN


@pytest.mark.parametrize(
    ("nodes", "counts"),
    [
        ([{"count": 2, "gpus": 4}], "right"),
        ([{"gpus": 4}, {"gpus": 8, "ranks": 4}], "right"),
        ([{"count": 2, "gpus": 8}], "wrong"),
        ([], ""),
    ],
)
def test_nodes_and_ranks_are_compared(nodes: list[dict[str, int]], counts: str) -> None:
    assert judge_counts(SCRIPT, {"cluster": {"nodes": nodes}}) == counts


def test_options_in_another_order_are_not_lost() -> None:
    groups = " ".join(hash_words(group)[:8] for group in group_words(WORDS))
    start = replace(SCRIPT.starts[0], groups=groups)
    assert start.count_lost(["--min", "-1", "--new", "--out", "@", "--lr", "1e-3"]) == 0
    assert start.count_lost(["--lr", "1e-3", "--out", "@", "--min", "1"]) == 1

"""`vjob plan`: conf to question, answers told and written, refusals that help."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.command import ROOT
from tests.varuna_core.planner.profiles import call_measured
from varuna_core.planner.profile.profile import TIMES, Spread
from varuna_core.planner.profile.profile_file import read_profile, write_profile
from varuna_core.planner.profile.transformer import Transformer, estimate_profile
from varuna_core.records.training import name_shapes
from vjob.jobs.conf.loading.load import read_conf
from vjob.jobs.conf.schema import JobConf
from vjob.jobs.planning.plan_file import read_plan_file
from vjob.jobs.planning.resolve_auto import resolve_conf
from vjob.jobs.programs.training import build_training
from vjob.shelf.commands.cli import cli

CONF = """
name: tiny
program: pretrain_gpt
model: {layers: 6, hidden: 1024, heads: 8, vocab: 32000}
data: {synthetic: true}
train: {global_batch_size: 16, steps: 1000, precision: bf16}
cluster:
  scheduler: slurm
  nodes:
    - {group: fast, count: 1, gpus: "a100-40:4"}
    - {group: slow, count: 1, gpus: "a10:4"}
"""
NAME = "6x1024"
PRICES = ("--prices", "a100=12,a10=3")


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    path = tmp_path / "conf.yaml"
    path.write_text(CONF)
    return path


def plan(conf: Path, *args: str, code: int = 0) -> str:
    done = run(conf, *args)
    assert done.exit_code == code, done.output
    return done.output


def run(conf: Path, *args: str) -> Result:
    return CliRunner().invoke(cli, ["plan", str(conf), "--limit", "60", *args])


def read(conf: Path, *args: str) -> dict[str, Any]:
    done = run(conf, "--json", *args)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def put_profile(
    folder: Path,
    *,
    layers: int = 6,
    digest: str = "",
    torch: str = "",
    spread: Spread | None = None,
) -> Path:
    """As if measured: an estimate whose figures are called measured."""
    base = estimate_profile(
        Transformer(name=NAME, layers=layers, hidden=1024, heads=8, length=1024, vocabulary=32000),
        ["A100-40", "A10"],
        micro_batches=(1, 2, 4),
        degrees=(1, 2),
        inter_gb_s=10.0,
    )
    training = build_training(read_conf_of(folder), 1)
    assert training is not None
    gpus = {
        kind: replace(
            gpu,
            optimizer_source="measured",
            cells={
                key: replace(cell, source="measured", spread=spread)
                for key, cell in gpu.cells.items()
            },
        )
        for kind, gpu in base.gpus.items()
    }
    model = replace(base.model, digest=digest or name_shapes(training))
    software = {"torch": torch} if torch else {}
    profile = call_measured(replace(base, model=model, gpus=gpus, software=software))
    path = folder / "profiles" / f"{NAME}.profile.json"
    path.parent.mkdir(exist_ok=True)
    write_profile(path, profile)
    return path


def read_conf_of(folder: Path) -> JobConf:
    path = folder / "any.yaml"
    path.write_text(CONF)
    return read_conf(path, environ={})


def test_the_answer_has_its_parts(conf: Path) -> None:
    text = plan(conf, *PRICES)
    assert text.startswith(f"{NAME}, batch 16, on 1 x 4 a100-40 (fast) + 1 x 4 a10 (slow)")
    assert "ESTIMATE" in text and re.search(r"gap [0-9.]+ ?%", text)
    assert "memory GB" in text and "partition " in text and "cost against time" in text
    found = read(conf, *PRICES)
    best = found["plans"][0]
    assert sum(map(int, best["partition"].split("-"))) == 8
    assert sum(best["parts"].values()) == pytest.approx(best["step_s"])
    assert [row["step_s"] for row in found["plans"]] == sorted(
        row["step_s"] for row in found["plans"]
    )
    assert len(best["stage_work_s"]) == len(best["memory_bytes"]) == best["stages"]
    pairs = zip(best["memory_bytes"], best["limit_bytes"], strict=True)
    assert all(held <= limit for held, limit in pairs)
    one, *others = found["certificate"]["classes"]
    assert one["schedules"] == ["1f1b", "gpipe", "varuna"] and one["coverage"] == "wholly"
    assert {row["coverage"] for row in others} >= {"not"}
    assert found["certificate"]["gap"]["value"] < 0.05
    prices = [row["price_per_step"] for row in found["front"]]
    times = [row["step_s"] for row in found["front"]]
    assert times == sorted(times) and prices == sorted(prices, reverse=True)
    assert times[0] == pytest.approx(best["step_s"])


def test_keys_that_the_conf_writes_are_kept(conf: Path) -> None:
    for key, value, name in (
        ("parallel.pipeline", "3", "pipeline"),
        ("parallel.data", "2", "replicas"),
        ("parallel.tensor", "2", "tensor"),
        ("train.micro_batch_size", "2", "micro_batch"),
        ("parallel.schedule", "gpipe", "schedule"),
        ("parallel.recompute", "full", "recompute"),
        ("parallel.zero", "1", "zero"),
    ):
        found = read(conf, "--set", f"{key}={value}")
        assert {str(row[name]) for row in found["plans"]} == {value}
    found = read(conf, "--set", "parallel.partition=3-3")
    assert {row["partition"] for row in found["plans"]} == {"4-4"}
    found = read(conf, "--set", "parallel.pipeline=auto", "--set", "parallel.data=auto")
    free = read(conf)["plans"]
    assert [row["step_s"] for row in found["plans"]] == [row["step_s"] for row in free]


def test_a_measured_profile_beside_the_conf_is_used(conf: Path) -> None:
    path = put_profile(conf.parent)
    found = read(conf)
    assert not found["is_estimate"] and str(path) in found["basis"]
    assert found["plans"][0]["sources"] == ["measured"]
    assert read(conf, "--estimate")["is_estimate"]
    elsewhere = conf.parent / "other.json"
    path.rename(elsewhere)
    assert read(conf)["is_estimate"]
    assert not read(conf, "--profile", str(elsewhere))["is_estimate"]


def test_a_measured_spread_gives_a_band_and_may_prefer_what_is_simpler(conf: Path) -> None:
    put_profile(conf.parent)
    one_stage = ("--set", "parallel.schedule=1f1b")
    plain = read(conf, *one_stage)["plans"]
    assert all(one["band_s"] == [] for one in plain)
    uneven = (0.8, 0.95, 1.0, 1.05, 1.3)
    put_profile(conf.parent, spread=Spread(rounds=uneven, actions=(uneven,) * len(TIMES)))
    written = conf.parent / "plan.json"
    found = read(conf, *one_stage, "--write", str(written))
    best = found["plans"][0]
    low_s, high_s = best["band_s"]
    assert low_s < best["step_s"] < high_s
    assert sum(best["parts"].values()) == pytest.approx(best["step_s"])
    assert (plain[0]["zero"], best["zero"]) == (1, 0)
    assert "cannot tell from the fastest" in found["chosen_for"]
    assert low_s < found["plans"][1]["step_s"] < high_s, "the fastest comes next"
    told = json.loads(written.read_text())["prediction"]
    assert told["band_s"] == best["band_s"] and told["step_s"] == best["step_s"]
    text = plan(conf, *one_stage)
    assert "nine of ten steps are expected to take" in text and "9 of 10" in text
    assert "this one takes" in text, "the gap is the chosen plan's"
    head = next(line for line in text.splitlines() if " s a step" in line)
    assert "(median of simulated steps; " in head and head.count("at median times") == 1
    assert "Megatron" not in text


def test_graphs_on_the_host_are_named(conf: Path) -> None:
    words = ("parallel.recompute=offload", "parallel.pipeline=4", "parallel.data=1")
    words = (*words, "train.micro_batch_size=2", "parallel.tensor=1", "parallel.schedule=1f1b")
    changes = [word for key in words for word in ("--set", key)]
    best = read(conf, *changes)["plans"][0]
    assert best["recompute"] == "offload"
    first, second, *rest = best["host_bytes"]
    assert first > second > 0 and rest == [0, 0]
    assert f"the host needs up to {first / 2**30:.1f} GB" in plan(conf, *changes)
    assert "the host needs" not in plan(conf)


def test_what_does_not_fit_is_recomputed_and_no_more(conf: Path) -> None:
    sizes = ("--set", "model={layers: 84, hidden: 2048, heads: 16}")
    nodes = ("--set", 'cluster.nodes=[{group: a, gpus: "a10:4"}]')
    fixed = ("pipeline=4", "tensor=1", "schedule=1f1b")
    fixed = (*(f"parallel.{key}" for key in fixed), "train.global_batch_size=64")
    words = [*sizes, *nodes, *(word for key in fixed for word in ("--set", key))]
    written = conf.parent / "plan.json"
    best = read(conf, *words, "--write", str(written))["plans"][0]
    assert (best["recompute"], best["schedule"]) == ("auto", "1f1b")
    assert json.loads(written.read_text())["set"]["parallel.recompute"] == "auto"
    pairs = zip(best["memory_bytes"], best["limit_bytes"], strict=True)
    assert all(held <= limit for held, limit in pairs)
    took = {}
    for way in ("none", "full"):
        done = run(conf, "--json", *words, "--set", f"parallel.recompute={way}")
        took[way] = json.loads(done.stdout)["plans"][0]["step_s"] if done.exit_code == 0 else None
    assert took["none"] is None and took["full"] is not None
    assert best["step_s"] < took["full"]
    megatron = ("--set", "program={megatron: pretrain_gpt.py}")
    found = read(conf, *megatron, *words, "--set", "model.layers=48")
    assert {row["recompute"] for row in found["plans"]} <= {"none", "full"}


def test_links_that_these_nodes_cannot_have_are_not_asked_for(conf: Path) -> None:
    """One node of a kind sends nothing to another of its kind; two do."""
    path = put_profile(conf.parent)
    whole = read_profile(path)
    links = {
        key: link
        for key, link in whole.network.links.items()
        if key[2] == "intra" or key[:2] == ("A10", "A100-40")
    }
    bare = replace(whole, network=replace(whole.network, links=links))
    write_profile(path, bare)
    read(conf)
    two = ("--set", "cluster.nodes[1].count=2")
    assert "no inter-node link from A10 to A10" in plan(conf, *two, code=2)
    assert "as --link says" in plan(conf, *two, "--link", "3")
    alone = {key: link for key, link in links.items() if key[2] == "intra"}
    write_profile(path, replace(bare, network=replace(bare.network, links=alone)))
    read(conf, "--set", 'cluster.nodes=[{group: a, gpus: "a10:4"}]')


def test_a_profile_of_something_else_is_refused(conf: Path) -> None:
    put_profile(conf.parent, digest="other shapes")
    assert "other shapes" in plan(conf, code=2)
    put_profile(conf.parent, layers=7)
    assert "9 segments" in plan(conf, code=2)
    put_profile(conf.parent, torch="0.1")
    assert "torch 0.1" in plan(conf, code=2)
    broken = conf.parent / "profiles" / f"{NAME}.profile.json"
    broken.write_text("{")
    assert "not JSON" in plan(conf, code=2)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["cluster.nodes[0].gpus=b999:4"], ["'b999'", "A100-40"]),
        (["cluster.nodes[0].gpus=4"], ["of unknown type", "a100:4"]),
        (["train.global_batch_size=null"], ["train.global_batch_size"]),
        (["parallel.pipeline=9"], ["9 stages", "8 segments", "pipeline 9 alone", "nearest"]),
        (
            ["parallel.pipeline=4", "parallel.data=4"],
            ["pipeline 4 x parallel.data 4 needs 16 GPUs, but there are 8", "cannot be combined"],
        ),
        (["parallel.data=3"], ["parallel.data 3 alone", "nearest plan"]),
        (["parallel.partition=1-2-9"], ["counts 12 segments", "has 8"]),
        (
            ["parallel.schedule=varuna", "parallel.recompute=none"],
            ["schedule varuna, parallel.recompute none", "cannot be combined"],
        ),
        (
            ["parallel.zero=3", "parallel.schedule=zero_bubble"],
            ["zero_bubble cannot be planned with zero 3", "use 1f1b"],
        ),
        (["parallel.tensor=8"], ["tensor 8"]),
        (["cluster.nodes=[{group: a, ranks: 2}]"], ["no GPUs", "--from-slurm"]),
    ],
)
def test_refusals_name_what_contradicts(conf: Path, settings: list[str], said: list[str]) -> None:
    words = [word for setting in settings for word in ("--set", setting)]
    text = plan(conf, *words, code=2)
    for words_said in said:
        assert words_said in text, text


def test_what_does_not_fit_says_by_how_much_and_what_would(conf: Path) -> None:
    sizes = ("--set", "model={layers: 24, hidden: 5120, heads: 8}")
    fixed = ("parallel.pipeline=8", "parallel.recompute=none", "parallel.schedule=gpipe")
    words = [word for key in fixed for word in ("--set", key)]
    text = plan(conf, *sizes, *words, "--set", "train.global_batch_size=64", code=2)
    factor = re.search(r"would fit with ([0-9.]+) times the memory", text)
    assert factor and float(factor[1]) > 1, text
    assert "GB instead of" in text and ("nearest plan" in text or "add nodes" in text)


def test_the_nearest_plan_changes_what_it_must(conf: Path) -> None:
    """One wish is in the way of memory: only that is changed."""
    fixed = ("parallel.schedule=gpipe", "parallel.recompute=none", "parallel.data=1")
    words = [word for key in fixed for word in ("--set", key)]
    sizes = ("--set", "model={layers: 24, hidden: 4096, heads: 8}")
    more = ("--set", "train.global_batch_size=512", "--set", "train.micro_batch_size=1")
    text = plan(conf, *sizes, *words, *more, code=2)
    nearest = re.search(r"nearest plan that fits has ([^(]*)\(", text)
    assert nearest and nearest[1].count(":") == 1, text


def test_zero_2_and_3_are_planned_where_the_conf_asks_for_them(conf: Path) -> None:
    took = {}
    for zero in (0, 1, 2, 3):
        words = ("--set", f"parallel.zero={zero}", "--set", "parallel.data=2", "--json")
        found = json.loads(plan(conf, *words))
        assert found["plans"][0]["zero"] == zero
        took[zero] = found["plans"][0]["step_s"]
    assert took[1] <= took[2] < took[3], "each micro-batch has sums, and then weights, of its own"


def test_where_only_zero_3_fits_it_is_named(conf: Path) -> None:
    """All weights of a wide model do not lie on one GPU, a share of them does."""
    sizes = ("--set", "model={layers: 6, hidden: 8192, heads: 8}", "--set", "parallel.tensor=1")
    fixed = ("--set", "parallel.pipeline=1", "--set", "train.global_batch_size=8")
    text = plan(conf, *sizes, *fixed, code=2)
    hint = r"fits with parallel\.zero: 3 \(.*zero 3; at most .* s a step\)"
    assert re.search(hint, text), text
    other = plan(conf, *sizes, *fixed, "--set", "train.optimizer={name: lamb}", code=2)
    assert "zero: 3" not in other, "the conf could not have it"


def test_one_gpu_and_one_layer(conf: Path) -> None:
    alone = ("--set", 'cluster.nodes=[{group: a, gpus: "a100-80:1"}]')
    best = read(conf, *alone)["plans"][0]
    assert (best["stages"], best["replicas"], best["tensor"]) == (1, 1, 1)
    small = ("--set", "model={layers: 1, hidden: 64, heads: 2}")
    best = read(conf, *small)["plans"][0]
    assert best["stages"] <= 3
    assert read(conf, *alone, *small)["plans"][0]["partition"] == "3"


def test_a_script_is_planned_by_its_own_profile(conf: Path, tmp_path: Path) -> None:
    path = put_profile(conf.parent)
    (tmp_path / "train.py").touch()
    text = CONF.replace("program: pretrain_gpt", "program: {script: train.py}")
    kept = [line for line in text.splitlines() if not line.startswith(("model", "data"))]
    conf.write_text("\n".join(kept))
    assert "has no model" in plan(conf, code=2)
    assert not read(conf, "--profile", str(path))["is_estimate"]
    short = read(conf, "--profile", str(path), "--set", "parallel.partition=3-3")
    assert {row["partition"] for row in short["plans"]} == {"4-4"}, "as training takes it"


def test_missing_prices_are_said(conf: Path) -> None:
    assert "no prices given" in plan(conf)
    assert "no price for fast" in plan(conf, "--budget", "5", "--prices", "a10=3", code=2)
    assert "TYPE=PRICE" in plan(conf, "--prices", "a10", code=2)


def test_budget_and_deadline_choose_from_the_front(conf: Path) -> None:
    front = read(conf, *PRICES)["front"]
    assert len(front) > 1
    fastest, cheapest = front[0], front[-1]
    enough = fastest["price_per_step"] * 1000 * 1.01
    assert read(conf, *PRICES, "--budget", f"{enough}")["plans"][0]["step_s"] == pytest.approx(
        fastest["step_s"]
    )
    little = cheapest["price_per_step"] * 1000 * 1.001
    chosen = read(conf, *PRICES, "--budget", f"{little}")
    assert chosen["plans"][0]["step_s"] == pytest.approx(cheapest["step_s"])
    assert "fastest plan within" in chosen["chosen_for"]
    hours = cheapest["step_s"] * 1000 / 3600 * 1.001
    by_time = read(conf, *PRICES, "--deadline", f"{hours}")["plans"][0]
    assert by_time["step_s"] == pytest.approx(cheapest["step_s"])
    assert "the cheapest costs" in plan(conf, *PRICES, "--budget", f"{little / 100}", code=2)
    assert "the fastest takes" in plan(conf, *PRICES, "--deadline", f"{hours / 1e4}", code=2)
    both = ("--budget", f"{little}", "--deadline", f"{fastest['step_s'] * 1000 / 3600 * 1.001}")
    assert "raise the budget or the deadline" in plan(conf, *PRICES, *both, code=2)


def test_a_written_plan_is_a_conf_that_passes_every_check(conf: Path) -> None:
    """Also one that leaves nodes and ranks over, and has another order of nodes."""
    out = conf.parent / "plan.json"
    for more in ((), ("--set", "parallel.data=3", "--set", "train.global_batch_size=18")):
        found = read(conf, *more, "--write", str(out))
        best = found["plans"][0]
        chosen = read_plan_file(out)
        assert chosen.prediction is not None
        assert chosen.prediction.step_s == pytest.approx(best["step_s"])
        overrides = [word for word in more if word != "--set"]
        settled = resolve_conf(conf, overrides, plan=chosen).conf
        assert settled.parallel.pipeline == best["pipeline"]
        assert str(settled.parallel.partition) == best["partition"]
        assert settled.train.micro_batch_size == best["micro_batch"]
        ranks = sum(group.count * group.num_ranks for group in settled.cluster.nodes)
        assert ranks == best["pipeline"] * best["replicas"] * best["tensor"]
        assert read_plan_file(out, ["parallel.pipeline=1"]).prediction is None
        for word in ("cluster.nodes[0].count=2", "cluster.nodes=[]", "parallel={}"):
            assert read_plan_file(out, [word]).prediction is None, "its nodes or its layout change"
        assert read_plan_file(out, ["parallel.pipeline_x=1"]).prediction is not None
    layout = json.loads(out.read_text())["layout"]
    assert layout.count("|") == best["stages"] - 1 and layout[0] == "E" and layout[-1] == "L"
    out.write_text("{}")
    done = CliRunner().invoke(cli, ["submit", str(conf), "--plan", str(out), "--dry-run"])
    assert done.exit_code == 2 and "not a plan of this vjob" in done.output


SINFO = """\
n1 |gpu* |idle |gpu:a100:4(S:0-1) |ib,a100 |
n1 |all |idle |gpu:a100:4(S:0-1) |ib,a100 |
n2 |gpu* |mixed |gpu:a100:4(S:0-1) |ib,a100 |
n3 |gpu* |drained |gpu:a100:4 |ib |
n4 |old |idle |gpu:8 |rtx3090,x86 |
n5 |cpu |idle |(null) |(null) |
n6 |old |down* |gpu:8 |rtx3090 |
n7 |gpu* |idle |gpu:odd:2 |x |
n8 |gpu* |idle |gpu:odd:2 |x |
n9 |gpu* |idle |gpu:odd:2 |x |
"""


def test_nodes_come_from_slurm(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = conf.parent / "bin"
    folder.mkdir()
    sinfo = folder / "sinfo"
    text = SINFO.replace("a100", "a100-80")
    sinfo.write_text(f"#!/bin/sh\ncat <<'END'\n{text}END\n")
    sinfo.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    written = conf.parent / "plan.json"
    out = plan(conf, "--from-slurm", "--write", str(written))
    assert "2 x 4 a100-80" in out and "1 x 8 RTX3090" in out and "left out 3 x odd:2" in out
    nodes = json.loads(json.loads(written.read_text())["set"]["cluster.nodes"])
    assert {node["queue"] for node in nodes} <= {"gpu", "old"}
    monkeypatch.setenv("XDG_STATE_HOME", str(conf.parent / "second"))  # an answer stays a minute
    sinfo.write_text("#!/bin/sh\necho no >&2; exit 1\n")
    assert "sinfo failed: no" in plan(conf, "--from-slurm", code=1)
    monkeypatch.setenv("XDG_STATE_HOME", str(conf.parent / "third"))
    sinfo.write_text("#!/bin/sh\n")
    assert "no node with GPUs" in plan(conf, "--from-slurm", code=2)
    assert "--from-slurm" in plan(conf, "--queue", "x", code=2)


def test_without_numpy_it_says_how_to_get_it(tmp_path: Path) -> None:
    (tmp_path / "conf.yaml").write_text(CONF)
    code = (
        "import sys; sys.modules['numpy'] = None; from vjob.shelf.commands.cli import cli\n"
        "cli.main(['plan', 'conf.yaml'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1 and "not installed: pip install numpy" in done.stderr
    assert "Traceback" not in done.stderr


def test_several_stages_a_rank_are_planned_and_submitted(conf: Path) -> None:
    put_profile(conf.parent)
    written = conf.parent / "plan.json"
    words = ("--set", "parallel.data=1", "--set", "train.global_batch_size=4")
    best = read(conf, *words, "--write", str(written))["plans"][0]
    assert best["schedule"] in ("zbv", "interleaved")
    assert best["stages"] > best["pipeline"] > 1
    assert len(best["stage_kinds"]) == len(best["memory_bytes"]) == best["stages"]
    held = [stage for node in best["nodes"] for stage in node["stages"]]
    assert sorted(held) == list(range(best["stages"]))
    text = plan(conf, *words)
    assert f"{best['stages']} stages on {best['pipeline']} ranks, {best['schedule']}" in text
    assert re.search(r"2 to 4 stages a rank\b.* searched (wholly|in part)", text), text
    for zero in ("0", "1", "2"):  # what is planned passes the conf's own checks
        read(conf, *words, "--set", f"parallel.zero={zero}", "--write", str(written))
        more = ["submit", str(conf), "--plan", str(written), "--dry-run", *words]
        assert CliRunner().invoke(cli, more).exit_code == 0, zero

"""`vjob try` on this machine: staged mistakes are found, healthy programs are not blamed."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.command import PROGRAMS, Vjob, wait_for
from tests.small_training import write_text
from tests.staged_mistakes import MISTAKES, write_mistake

TIMEOUT_S = 800
pytestmark = pytest.mark.timeout(900)
BUILT_IN = """
name: tiny
program: pretrain_gpt
model: {{layers: 4, hidden: 16, heads: 2, sequence: 8, vocab: 64, dropout: 0.0}}
data: {{prefix: text, split: "8,2,0"}}
train:
  steps: 5000
  global_batch_size: 8
  micro_batch_size: 2
  evaluate: {{every: 100, steps: 2}}
  checkpoint: {{folder: {folder}, every: 50}}
parallel: {{pipeline: 2}}
cluster: {{scheduler: local, nodes: [{{group: all, count: 1, ranks: 2}}]}}
env: {{OMP_NUM_THREADS: "1"}}
"""
VARUNA = f"""
name: ours
program: {{script: {PROGRAMS / "varuna_script.py"}, args: ["100000"], snapshot: none}}
train: {{global_batch_size: 8, micro_batch_size: 2, checkpoint: {{folder: checkpoints}}}}
parallel: {{pipeline: 2}}
cluster: {{scheduler: local, nodes: [{{group: all, count: 1, ranks: 2}}]}}
env: {{PYTHONPATH: {ROOT}}}
"""


@pytest.fixture
def vjob(tmp_path: Path) -> Vjob:
    return Vjob(tmp_path)


def try_out(vjob: Vjob, *options: str, code: int) -> dict[str, Any]:
    words = options if "--limit" in options else ("--limit", "15m", *options)
    done = vjob("try", "conf.yaml", "--json", *words, code=code, timeout_s=TIMEOUT_S)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def rows_of(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in found["rows"]}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found_and_its_cause_named(vjob: Vjob, name: str) -> None:
    mistake = MISTAKES[name]
    if mistake.needs_torch and importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    write_mistake(vjob.folder, mistake)
    found = try_out(vjob, "--limit", f"{mistake.limit_s}s", code=1)
    causes = [finding["cause"] for finding in found["findings"]]
    assert any(all(word in cause for word in mistake.cause) for cause in causes), found
    waits = "".join(found["stacks"])
    assert ("accept (" in waits and "train.py" in waits) == ("ranks wait" in mistake.cause), found


def test_a_healthy_script_is_ended_after_its_steps_and_leaves_nothing(vjob: Vjob) -> None:
    write_mistake(vjob.folder, None, {"train": {"checkpoint": {"folder": "saved/here"}}})
    found = try_out(vjob, code=0)
    rows = rows_of(found)
    assert found["findings"] == []
    assert rows["starts"]["text"].startswith("yes")
    assert rows["starts"]["values"]["ranks"] == 2
    assert "can be written" in rows["checkpoint"]["text"]
    assert not (vjob.folder / "saved").exists()
    assert list((vjob.folder / "log").iterdir()) == []
    assert vjob("list").stdout.count("try-") == 0


def test_lines_of_every_fifth_step_are_not_counted_as_steps(vjob: Vjob) -> None:
    write_mistake(vjob.folder, None)
    loop = "for at in itertools.count(5, 5):\n    print(f'step {at} loss 2.5', flush=True)\n"
    text = f"import itertools, time\n{loop}    time.sleep(0.2)\n"
    (vjob.folder / "train.py").write_text(text)
    found = try_out(vjob, code=0)
    start = rows_of(found)["starts"]
    assert re.match(rf"yes: step {start['values']['last_step']} in ", start["text"])


def test_a_script_that_tells_of_no_step_is_not_blamed(vjob: Vjob) -> None:
    """It computes and says nothing: nobody can know whether that is well."""
    one = {"cluster": {"nodes": [{"group": "all", "count": 1, "ranks": 1}]}}
    write_mistake(vjob.folder, None, one)
    (vjob.folder / "train.py").write_text("while True:\n    sum(range(1000))\n")
    found = try_out(vjob, "--limit", "8s", code=0)
    assert rows_of(found)["starts"]["text"].startswith("not known: the program runs, but no step")


def test_a_built_in_program_saves_a_checkpoint(vjob: Vjob) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    write_text(vjob.folder)
    vjob.write(BUILT_IN.format(folder="checkpoints"))
    found = try_out(vjob, code=0)
    rows = rows_of(found)
    assert found["findings"] == [] and found["differs"] == []
    assert rows["checkpoint"]["values"]["saved"] is True
    assert rows["memory"]["text"] == "not known: no GPU was sampled"
    assert not (vjob.folder / "checkpoints").exists()


def test_a_script_of_varunas_saves_when_it_is_ended(vjob: Vjob) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    vjob.write(VARUNA)
    found = try_out(vjob, code=0)
    rows = rows_of(found)
    assert found["findings"] == []
    assert rows["checkpoint"]["values"]["saved"] is True, rows
    assert not (vjob.folder / "checkpoints").exists()


def test_what_was_found_stands_first_and_80_columns_hold_it(vjob: Vjob) -> None:
    write_mistake(vjob.folder, MISTAKES["a missing argument"])
    lines = vjob("try", "conf.yaml", code=1).stdout.splitlines()
    assert lines[0].startswith("FOUND")
    assert all(len(line) <= 80 for line in lines if not line.startswith("files"))
    files = next(line.split()[1] for line in lines if line.startswith("files"))
    assert (Path(files) / "plan.json").exists()


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"pass_env": ["NO_SUCH_SECRET"]}, "NO_SUCH_SECRET"),
        ({"program": {"python": "/opt/envs/gone/bin/python3"}}, "/opt/envs/gone/bin/python3"),
    ],
)
def test_a_conf_that_cannot_be_submitted_is_refused_as_by_submit(
    vjob: Vjob, keys: dict[str, Any], said: str
) -> None:
    write_mistake(vjob.folder, None, keys)
    assert said in vjob("try", "conf.yaml", code=2).stderr


def test_an_interrupted_try_is_cancelled_and_removed(vjob: Vjob) -> None:
    write_mistake(vjob.folder, None, {"train": {"checkpoint": {"folder": "saved"}}})
    (vjob.folder / "train.py").write_text(
        "import contextlib, os, time\n"
        "while True:\n"
        "    time.sleep(0.001)\n"
        "    with contextlib.suppress(OSError):\n"
        "        os.makedirs(os.environ['VJOB_CHECKPOINT'] + '/written')\n"
    )
    process = vjob.start("try", "conf.yaml")
    try:
        wait_for(lambda: list(vjob.folder.glob("saved/.vjob-try-*/written")), 90)
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130
    finally:
        process.kill()
        process.wait()
    assert not list(vjob.folder.glob("log/*"))
    assert not (vjob.folder / "saved").exists()

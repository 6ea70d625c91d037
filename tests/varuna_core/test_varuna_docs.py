"""The program in docs/training.md runs, and two processes print what one prints."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import ROOT
from tests.command import Forked
from tests.jobs.programs.free_port import find_free_port
from tests.ranks.start import DEADLINE_S
from varuna_core import Varuna


def run(script: Path, world_size: int) -> set[str]:
    """Return what the ranks print. A single rank runs in a fresh Python, so that an import that the
    page forgets is missing there; several ranks are forked."""
    port = str(find_free_port())
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world_size)}
    env |= {"RANK": "0", "PYTHONPATH": str(ROOT)}
    if world_size == 1:
        return {
            subprocess.run(
                [sys.executable, script], cwd=script.parent, env=env, stdout=subprocess.PIPE,
                text=True, timeout=DEADLINE_S, check=True,
            ).stdout
        }  # fmt: skip
    ranks = [
        Forked("ranks", str(script), [], script.parent, {**env, "RANK": str(rank)})
        for rank in range(world_size)
    ]
    done = [rank.finish(DEADLINE_S) for rank in ranks]
    assert not any(each.returncode for each in done), done
    return {each.stdout for each in done}


def read_programs(name: str = "training.md", language: str = "python") -> list[str]:
    page = (ROOT / "docs" / name).read_text()
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def read_trainings() -> list[str]:
    return [text for text in read_programs() if "model = Varuna(Net(), stage_map" in text]


def test_the_model_without_memory_in_the_page_takes_the_same_weights_in_any_order() -> None:
    held: dict[str, Any] = {}
    exec(read_programs()[0].split("torch.manual_seed(0)")[0], held)
    x, y = torch.randn(16, 32), torch.rand(16, 32)
    (text,) = (text for text in read_programs() if "varuna = Varuna(net" in text)
    found = []
    for _ in range(2):
        torch.randn(1)  # what else draws has no part in it
        exec(text, held | {"x": x, "y": y, "stage_map": "0;"}, held)
        varuna = held["varuna"]
        assert all(parameter.is_meta for parameter in held["net"].parameters())
        found.append(varuna.state_dict())
        varuna.step({"x": x, "y": y})
        varuna.close()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_the_mean_over_tokens_in_the_page_is_the_plain_models() -> None:
    (text,) = (text for text in read_programs() if "TokenMean" in text)
    held: dict[str, Any] = {}
    exec(text, held)
    tokens = torch.arange(42).view(7, 6) % 20
    batch = {
        "tokens": tokens,
        "labels": tokens.masked_fill(tokens % 7 > torch.arange(7)[:, None], -100),
    }
    plain = held["Masked"]()
    loss = plain(**batch).mean()
    loss.backward()
    for is_counted in (True, False):
        if not is_counted:
            del held["Masked"].loss_counts
        model = held["Masked"]()
        model.load_state_dict(plain.state_dict())
        varuna = Varuna(model, "0;", batch, 7, 2, device="cpu")
        torch.testing.assert_close(varuna.step(batch)[0], loss.detach())
        for name, master in varuna.masters().items():
            torch.testing.assert_close(master.grad, plain.get_parameter(name).grad)
        varuna.close()


def test_the_port_in_the_page_runs_as_one_and_as_two_processes_and_by_its_conf(
    tmp_path: Path,
) -> None:
    program, *_ = read_trainings()
    assert program.count("# +") <= 10
    (tmp_path / "train.py").write_text(program)
    (alone,) = run(tmp_path / "train.py", 1)
    assert alone.startswith("loss 0.")
    assert run(tmp_path / "train.py", 2) == {alone}
    (conf,) = read_programs(language="yaml")
    (tmp_path / "conf.yaml").write_text(conf)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path / "state")}
    words = [sys.executable, "-m", "vjob", "submit", "conf.yaml", "--follow"]
    subprocess.run(words, cwd=tmp_path, env=env, timeout=DEADLINE_S, check=True)
    (printed,) = (log.read_text() for log in tmp_path.glob("log/mine-*/attempt-0/*.out"))
    assert printed.count(alone.strip()) == 4, printed


@pytest.mark.long
def test_the_program_in_fp16_runs_as_one_and_as_two_processes(tmp_path: Path) -> None:
    program, rest, _ = read_trainings()
    (tmp_path / "train.py").write_text(program[: program.index("model = Varuna(")] + rest)
    (alone,) = run(tmp_path / "train.py", 1)
    assert re.fullmatch(r"loss 0\.\d\d overflow False scale \d+\n", alone)
    assert run(tmp_path / "train.py", 2) == {alone}


def test_the_program_with_checkpoints_goes_on_in_another_layout(tmp_path: Path) -> None:
    program, _, rest = read_trainings()
    text = program[: program.index("model = Varuna(")] + rest
    for name, steps in (("whole", 20), ("parts", 8)):
        (tmp_path / name).mkdir()
        changed = text.replace("model.iteration, 20", f"model.iteration, {steps}")
        (tmp_path / name / "train.py").write_text(changed)
    (alone,) = run(tmp_path / "whole" / "train.py", 1)
    assert alone.startswith("from the start\nloss 0.")
    run(tmp_path / "parts" / "train.py", 2)
    (tmp_path / "parts" / "train.py").write_text(text)
    assert run(tmp_path / "parts" / "train.py", 1) == {alone.partition("\n")[2]}


@pytest.mark.long
def test_the_script_that_morphs_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    """In the page's own words: 40 steps of two ranks, then the rest of three, as one has them."""
    (program,) = read_programs("morphing.md")
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    script = tmp_path / "parts" / "train.py"
    script.write_text(program.replace("place.step < 100", "place.step < 40"))
    assert any("step 40/100" in said for said in run(script, 2))
    script.write_text(program)
    said = run(script, 3)
    assert any(text.startswith("step 41/100") for text in said)
    (tmp_path / "whole" / "train.py").write_text(program)
    run(tmp_path / "whole" / "train.py", 1)
    check = "import torch; print(torch.load('own.pt')['net']['weight'].tolist())"
    weights = [
        json.loads(
            subprocess.run(
                [sys.executable, "-c", check],
                cwd=tmp_path / name,
                capture_output=True, text=True, timeout=DEADLINE_S, check=True,
            ).stdout
        )[0]
        for name in ("whole", "parts")
    ]  # fmt: skip
    assert weights[0] == pytest.approx(weights[1], rel=1e-4)

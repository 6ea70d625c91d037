"""`vjob try` blames no example; those for GPUs run small, with all their layers and stages."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.command import Vjob

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

BUILT_IN = ("tiny-gpt", "gpt2-small", "gpt2-xl", "gpt2-xl-mixed", "bert-large")
LONG = ("foreign", "gpt2-small", "gpt2-xl", "gpt2-xl-mixed", "bert-large")
OTHERS = ("quickstart", "foreign")
LIMIT = "15m"
TIMEOUT_S = 1100


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] * (name in LONG))
        for name in (*OTHERS, *BUILT_IN)
    ],
)
def test_an_example_is_not_blamed(tmp_path: Path, name: str) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    if name == "foreign":
        pytest.importorskip("transformers", reason="transformers is not installed")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    vjob = Vjob(tmp_path / "examples")
    if name == "tiny-gpt":
        prepare_text(vjob)
    # The image is on a registry; without it the ranks run bare.
    words = ["--set", "container.image=null"] if name == "bert-large" else []
    done = vjob("try", f"{name}.yaml", "--here", "--json", "--limit", LIMIT, *words, code=None,
                timeout_s=TIMEOUT_S)  # fmt: skip
    found = json.loads(done.stdout)
    rows = {row["name"]: row for row in found["rows"]}
    assert found["findings"] == [] and rows["starts"]["text"].startswith("yes")
    if name in BUILT_IN and name != "gpt2-xl-mixed":  # which saves nothing
        assert rows["checkpoint"]["values"]["saved"] is True


def prepare_text(vjob: Vjob) -> None:
    """Token files of the example, as `make demo` makes them."""
    data = vjob.folder / "data"
    data.mkdir()
    with (data / "corpus.jsonl").open("w") as corpus:
        subprocess.run(
            [sys.executable, "-m", "tests.corpus"],
            env=vjob.env, stdout=corpus, check=True, timeout=TIMEOUT_S,
        )  # fmt: skip
    vjob("data", "prepare", "data/corpus.jsonl", "-o", "data/demo", "--train", "1000",
         "--append-eod")  # fmt: skip

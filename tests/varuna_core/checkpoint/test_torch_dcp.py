"""Folders of torch.distributed.checkpoint, of real FSDP2 and others, to ours and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.ranks.results import collect_results
from varuna_core import open_weights
from varuna_core.checkpoint.cli import main
from varuna_core.checkpoint.format.errors import CheckpointError
from varuna_core.checkpoint.format.remote import RemotePath
from varuna_core.checkpoint.store.reader import CheckpointReader

pytestmark = pytest.mark.filterwarnings("ignore")  # dcp's, of a process without ranks
LAYOUTS = ("replicas", "stages")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return collect_results("tests.ranks.dcp_rank", 2, tmp_path_factory.mktemp("dcp"))


def test_what_fsdp2_saved_begins_alike_in_two_layouts(told: list[dict[str, Any]]) -> None:
    states = [found[f"{layout} {source}"] for found in told for layout in LAYOUTS
              for source in ("fsdp", "bare")]  # fmt: skip
    first, *others = [state for state in states if state]
    assert len(others) == 3 and all(other == first for other in others), "to the bit"


def test_training_goes_on_from_it_as_fsdp2_goes_on(told: list[dict[str, Any]]) -> None:
    for found in told:
        for layout in LAYOUTS:
            assert found[layout] == pytest.approx(found["fsdp"], rel=1e-5)


def test_fsdp2_loads_what_any_layout_saved(told: list[dict[str, Any]]) -> None:
    assert all(found[f"{layout} apart"] < 1e-5 for found in told for layout in LAYOUTS)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def save_as(layout: str, folder: Path) -> nn.Module:
    """A plain model as several programs lay it out."""
    model = build()
    state = model.state_dict()
    moments = {f"state.{name}.exp_avg": torch.ones_like(t) for name, t in state.items()}
    named: dict[str, Any] = {
        "bare": state,
        "model": {"model": state, "step": 3},
        "app": {"app": {"model": state, "optim": {"state": {}}}},
        # As torchtitan: the model's names at the root, the rest under theirs.
        "titan": {**state, "optimizer": moments, "train_state": b"x", "dataloader": {"r": b"y"}},
        "names begin with model": {f"model.{name}": tensor for name, tensor in state.items()},
    }
    dcp.save(named[layout], checkpoint_id=folder)
    return model


@pytest.mark.parametrize("layout", ["bare", "model", "app", "titan", "names begin with model"])
def test_the_models_own_names_are_found_in_any_layout(tmp_path: Path, layout: str) -> None:
    model = save_as(layout, tmp_path / "dcp")
    assert main(["import", str(tmp_path / "dcp"), str(tmp_path / "ckpt")]) == 0
    before = "model." if layout == "names begin with model" else ""
    with CheckpointReader.open(tmp_path / "ckpt") as reader:
        found = {name: reader.read(name) for name in reader.state.shapes}
    wanted = {before + name: tensor for name, tensor in model.state_dict().items()}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("under", ["", "model"])
def test_torchs_own_tools_read_an_export(tmp_path: Path, under: str) -> None:
    model = save_as("bare", tmp_path / "dcp")
    assert main(["import", str(tmp_path / "dcp"), str(tmp_path / "ckpt")]) == 0
    words = ["export", "--dcp", str(tmp_path / "ckpt"), str(tmp_path / "out")]
    assert main([*words, "--under", under] if under else words) == 0
    dcp_to_torch_save(tmp_path / "out", tmp_path / "plain.pt")
    found = torch.load(tmp_path / "plain.pt")
    found = found[under] if under else found
    assert all(torch.equal(found[name], t) for name, t in model.state_dict().items())


def test_folders_in_an_object_store_are_read_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
    model = save_as("model", tmp_path / "dcp")
    url = f"memory://{tmp_path.name}"
    fsspec.filesystem("memory").put(str(tmp_path / "dcp"), f"/{tmp_path.name}/dcp", recursive=True)
    assert main(["import", f"{url}/dcp", str(tmp_path / "ckpt")]) == 0
    for flag, name in (("--dcp", "again"), ("--hf", "hf")):
        assert main(["export", flag, str(tmp_path / "ckpt"), f"{url}/{name}"]) == 0
        assert f"sent to {url}/{name}" in capsys.readouterr().out
        stored = open_weights(f"{url}/{name}")
        assert all(torch.equal(stored[n], t) for n, t in model.state_dict().items())
        assert main(["import", f"{url}/{name}", str(tmp_path / name)]) == 0
        assert main(["export", flag, str(tmp_path / "ckpt"), f"{url}/{name}"]) == 1, "it is there"
    assert main(["import", "nosuch://a/b", str(tmp_path / "c")]) == 1
    assert "nosuch://a/b cannot be opened" in capsys.readouterr().err


def test_without_fsspec_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "fsspec", None)
    with pytest.raises(
        CheckpointError, match=r"s3://a/b/\.metadata needs fsspec: pip install fsspec"
    ):
        open_weights("s3://a/b")
    assert str(RemotePath("s3://a/b") / "c") == "s3://a/b/c"


def test_an_optimizer_is_refused_where_there_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_as("bare", tmp_path / "dcp")
    words = ["import", str(tmp_path / "dcp"), str(tmp_path / "ckpt"), "--optimizer", "AdamW"]
    assert main(words) == 1
    assert "has no optimizer state: remove --optimizer" in capsys.readouterr().err

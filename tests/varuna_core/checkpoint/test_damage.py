"""A checkpoint that was cut short, changed or thinned out is never loaded as if it were whole."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch

from tests.ranks.checkpoint_world import SHAPES, Job, expect_state, save_all
from varuna_core.checkpoint.cli import main
from varuna_core.checkpoint.format import document
from varuna_core.checkpoint.format.document import read_document
from varuna_core.checkpoint.format.errors import CheckpointError
from varuna_core.checkpoint.format.manifest import Marker, Save, parse_marker, render_marker
from varuna_core.checkpoint.store.reader import CheckpointReader
from varuna_core.checkpoint.store.store import find_damage, find_good
from varuna_core.records.checkpoints import MANIFEST

OFFER = "; load iteration 1 instead"
SAVE = Save(iteration=1, save="a.1", job="a", line="a")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("saved")
    save_all(Job(store=str(store), job="a", iterations=[1, 2]), 0)
    return store


@pytest.fixture
def store(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "store")
    return tmp_path / "store"


def list_files(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.safetensors"), folder / "manifest.json"])


def read_all(folder: Path, check_complete: bool = True) -> None:
    with CheckpointReader(folder, check_complete) as reader:
        expect_state(reader)


@pytest.mark.parametrize("number", range(5))
def test_a_flipped_bit_anywhere_is_found(number: int, store: Path) -> None:
    folder = store / "varuna_ckpt_2"
    path = list_files(folder)[number]
    data = path.read_bytes()
    for place in random.Random(number).sample(range(len(data) * 8), 30):
        changed = bytearray(data)
        changed[place // 8] ^= 1 << place % 8
        path.write_bytes(changed)
        (fault, *_) = list(find_damage(folder))
        assert str(path) in fault, place
        # A header is for other tools: we read by the manifest, and only `verify` looks at it.
        if path.name == "manifest.json" or place // 8 >= 8 + int.from_bytes(data[:8], "little"):
            with pytest.raises(CheckpointError) as caught:
                read_all(folder)
            assert str(path) in str(caught.value) and OFFER in str(caught.value)
    path.write_bytes(data)
    assert list(find_damage(folder)) == []


def test_a_manifest_of_format_1_is_read_and_checked(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It repeated for each piece and each parameter what several have in common."""
    folder = store / "varuna_ckpt_2"
    content = read_document(folder / MANIFEST, "manifest")
    content["optimizer"] = {name: tree for tree, names in content["optimizer"] for name in names}
    for file in content["files"].values():
        file["pieces"] = [
            {"kind": kind, "dtype": dtype, "shape": shape, "offset": box[0], "extent": box[1]}
            | {"rows": rows, "name": name, "start": start, "checks": checks}
            for kind, dtype, shape, box, rows, *columns in file.pop("alike")
            for name, start, checks in zip(*columns, strict=True)
        ]
    with monkeypatch.context() as older:
        older.setattr(document, "VERSION", 1)
        document.write_document(folder / MANIFEST, "manifest", content)
    read_all(folder)
    assert list(find_damage(folder)) == []
    path = folder / "segment-0003.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match="segment-0003"):
        read_all(folder)


def test_parameters_with_the_same_options_share_a_record(store: Path) -> None:
    """Equal for Python is not enough: 1 and True, 0.0 and -0.0 stay what they were."""
    trees = {str(i): {"options": [value]} for i, value in enumerate([1, True, 1.0, 0.0, -0.0, 1])}
    marker = Marker(save=SAVE, rank=0, world_size=1, files={}, optimizer=trees)
    rendered = json.loads(json.dumps(render_marker(marker)))
    assert len(rendered["optimizer"]) == 5
    assert repr(dict(sorted(parse_marker(rendered, store).optimizer.items()))) == repr(trees)


@pytest.mark.parametrize("number", range(5))
def test_a_file_of_any_other_length_is_found(number: int, store: Path) -> None:
    folder = store / "varuna_ckpt_2"
    path = list_files(folder)[number]
    data = path.read_bytes()
    for length in [0, 1, 7, 8, 9, *random.Random(number).sample(range(len(data)), 20)]:
        path.write_bytes(data[:length])
        assert any(str(path) in fault for fault in find_damage(folder)), length
        for check in (True, False):
            with pytest.raises(CheckpointError) as caught:
                read_all(folder, check)
            assert str(path) in str(caught.value) and OFFER in str(caught.value)
    path.write_bytes(data + b"x")
    assert any(str(path) in fault for fault in find_damage(folder))


@pytest.mark.parametrize("number", range(4))
def test_a_missing_file_is_named(number: int, store: Path) -> None:
    folder = store / "varuna_ckpt_2"
    path = list_files(folder)[number + 1]
    path.unlink()
    assert any(f"{path} is missing" in fault for fault in find_damage(folder))
    good = find_good(store)
    assert good is not None and good.iteration == 1
    with pytest.raises(CheckpointError) as caught:
        CheckpointReader.open(store)
    assert f"{path} is missing" in str(caught.value) and OFFER in str(caught.value)
    with CheckpointReader.open(store, 1) as reader:
        expect_state(reader)


def test_another_checkpoints_file_is_found(store: Path) -> None:
    """Of the same size and layout, and whole."""
    folder = store / "varuna_ckpt_2"
    shutil.copy(store / "varuna_ckpt_1" / "segment-0002.safetensors", folder)
    with CheckpointReader(folder) as reader, pytest.raises(CheckpointError, match="segment-0002"):
        expect_state(reader)


def test_the_commands_say_what_is_wrong(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(store)]) == 0
    (store / "varuna_ckpt_2" / "segment-0001.safetensors").unlink()
    assert main(["verify", str(store)]) == 1
    assert main(["inspect", str(store)]) == 1
    assert main(["inspect", str(store / "varuna_ckpt_2")]) == 1
    assert main(["verify", str(store), "--iteration", "1"]) == 0
    assert main(["export", str(store), str(store.parent / "out.pt")]) == 1
    assert main(["verify", str(store / "nothing")]) == 2
    out, err = capsys.readouterr()
    assert "segment-0001.safetensors is missing" in err and OFFER in err
    assert "1 files missing or cut short" in out
    assert not (store.parent / "out.pt").exists()


def test_reading_a_part_checks_that_part(store: Path) -> None:
    """What another rank would read may be damaged: this one neither sees it nor minds."""
    folder = store / "varuna_ckpt_2"
    path = folder / "segment-0003.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with CheckpointReader(folder) as reader:
        for name in list(SHAPES)[:6]:
            assert reader.read(name).dtype == torch.float32

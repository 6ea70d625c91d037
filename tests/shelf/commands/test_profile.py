"""`vjob profile`: a job whose program measures, and where its file goes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command import Vjob, read_out
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.conf.loading.load import parse_conf
from vjob.jobs.errors import InputError
from vjob.shelf.commands.submit import build_words, choose_output

CONF = """
name: tiny
program: pretrain_gpt
model: {layers: 3, hidden: 16, heads: 2, sequence: 16, vocab: 64}
data: {synthetic: true}
train: {steps: 4, global_batch_size: 4}
parallel: {tensor: 2}
cluster: {scheduler: local, nodes: [{group: a, ranks: 2}]}
"""
SCRIPT = "name: x\nprogram: {script: a.py}\ncluster: {scheduler: local}\n"
IMAGE = "container: {image: /images/a.sqsh, runtime: enroot, mounts: [/data:/data]%s}\n"


def test_the_file_lies_next_to_the_conf_or_where_it_was_asked_for(tmp_path: Path) -> None:
    conf = parse_conf(CONF, "conf.yaml", tmp_path)
    assert choose_output(conf, tmp_path, None) == tmp_path / "profiles/3x16.profile.json"
    assert choose_output(conf, tmp_path, Path("/a/b.json")) == Path("/a/b.json")
    named = parse_conf(CONF.replace("{layers: 3, hidden: 16, heads: 2, sequence: 16, vocab: 64}",
                                    "gpt2-small"), "conf.yaml", tmp_path)  # fmt: skip
    assert choose_output(named, tmp_path, None).name == "gpt2-small.profile.json"


def test_a_script_is_told_to_measure_itself(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"varuna_core\.Profiler"):
        choose_output(parse_conf(SCRIPT, "conf.yaml", tmp_path), tmp_path, None)


def test_a_container_must_see_where_the_file_goes(tmp_path: Path) -> None:
    conf = parse_conf(CONF + IMAGE % "", "conf.yaml", tmp_path)
    assert choose_output(conf, tmp_path, None).is_relative_to(tmp_path)
    assert choose_output(conf, tmp_path, Path("/data/a.json")) == Path("/data/a.json")
    with pytest.raises(InputError, match="is not visible"):
        choose_output(conf, tmp_path, Path("/elsewhere/a.json"))
    inside = parse_conf(CONF + IMAGE % ", workdir: /work", "conf.yaml", tmp_path)
    with pytest.raises(InputError, match="is not visible"):
        choose_output(inside, tmp_path, None)


def test_words_follow_the_programs_own() -> None:
    assert build_words(Path("/a.json"), None, None) == ["--profile", "/a.json"]
    told = build_words(Path("/a.json"), "1,2", "2")
    assert told == ["--profile", "/a.json", "--sizes", "1,2", "--tensor", "2"]


def test_a_dry_run_shows_the_command_and_writes_nothing(tmp_path: Path) -> None:
    vjob = Vjob(tmp_path)
    said = vjob("profile", vjob.write(CONF), "--dry-run", "--sizes", "1,2").stdout
    assert '"--profile"' in said and '"1,2"' in said
    assert not (tmp_path / "log").exists() and not (tmp_path / "profiles").exists()
    assert "must be numbers" in vjob("profile", "conf.yaml", "--sizes", "0", code=2).stderr
    vjob.write(SCRIPT)
    (tmp_path / "a.py").touch()
    assert "docs/profiling.md" in vjob("profile", "conf.yaml", code=2).stderr


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_job_measures_and_a_second_one_extends(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    from varuna_core.planner.profile.profile_file import read_profile

    vjob = Vjob(tmp_path, {"OMP_NUM_THREADS": "1"})
    path = tmp_path / "profiles" / "3x16.profile.json"
    vjob.write(CONF)
    for sizes, cells in (
        ("1", {(1, 1), (1, 2)}),
        ("2", {(1, 1), (1, 2), (2, 1)}),
    ):
        more = ["--tensor", "1"] if sizes == "2" else []
        said = vjob("profile", "conf.yaml", "--json", "--sizes", sizes, *more).stdout
        assert json.loads(said)["profile"] == str(path)
        run = RunFolder(Path(json.loads(said)["folder"]))
        record = vjob.wait_over(run, 240)
        assert record["verdict"] == "COMPLETED", vjob.explain(run)
        profile = read_profile(path)
        assert set(profile.gpus["cpu"].cells) == cells
        assert read_profile(run.path / "profile.json") == profile
    assert profile.model.num_segments == 5
    assert ("cpu", "cpu", "intra") in profile.network.links
    out = read_out(run)
    assert "segments 0, 1, 2, 3, 4 measured" in out and f"written to {path}" in out


def test_an_open_layout_is_measured_on_all_of_its_nodes(tmp_path: Path) -> None:
    vjob = Vjob(tmp_path)
    conf = vjob.write(
        "name: x\nprogram: pretrain_gpt\nmodel: {layers: 4, hidden: 64, heads: 4}\n"
        "data: {synthetic: true}\ntrain: {global_batch_size: 7, micro_batch_size: auto}\n"
        "parallel: {pipeline: auto, data: 3}\n"
        "cluster: {scheduler: slurm, nodes: [{group: a, count: 5, gpus: 'a10:4'}]}\n"
    )
    for more in ((), ("--set", "parallel.pipeline=auto")):
        said = vjob("profile", conf, "--dry-run", *more).stdout
        assert "#SBATCH --nodes=5" in said and '"data": 20' in said

"""`vjob container doctor`: what is in an image, and what of a conf would not work in it."""

from __future__ import annotations

import configparser
import json
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests import ROOT
from tests.jobs.images.trees import (
    list_site,
    make_bare,
    make_conda,
    make_debian,
    make_nvidia,
    make_tree,
    squash,
)
from vjob.jobs.conf.loading.load import load_conf
from vjob.jobs.images.contents import FolderContents
from vjob.jobs.programs.megatron import Checkout, list_options
from vjob.jobs.programs.start import RUNTIME
from vjob.jobs.schedulers.diagnosis import Diagnosis
from vjob.shelf.commands.cli import cli
from vjob.shelf.doctor import image as doctoring
from vjob.shelf.doctor.doctor import render
from vjob.shelf.doctor.image import (
    examine_image,
    judge_conf,
    judge_driver,
    judge_programs,
    open_image,
)

GPUS = "cluster: {nodes: [{group: a, count: 1, gpus: 8}]}\n"
BUILT_IN = f"name: n\nprogram: pretrain_gpt\nmodel: gpt2-small\ndata: {{synthetic: true}}\n{GPUS}"
SCRIPT = "name: n\nprogram: {script: train.py}\n" + GPUS


def judge(tmp_path: Path, root: Path, text: str) -> dict[str, Diagnosis]:
    """Findings of a conf in a folder of its own, but for those that say that all is well."""
    path = tmp_path / "conf.yaml"
    path.write_text(text)
    read = load_conf(path)
    rows = judge_conf(read.conf, read.lines, open_image(FolderContents(root), read.conf))
    return {row.name: row for row in rows if row.name not in ("conf", "container")}


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, ["container", "doctor", *words])


def change(text: str, **keys: str) -> str:
    return text + "".join(f"{key}: {value}\n" for key, value in keys.items())


def examine(root: Path, driver: str = "") -> dict[str, str]:
    image = open_image(FolderContents(root))
    rows = [*examine_image(image, driver), judge_programs(image.software)]
    return {row.name: f"{row.status} {row.text}" for row in rows}


def test_nvidias_image_of_april_2023(tmp_path: Path) -> None:
    found = examine(make_nvidia(tmp_path / "root"), "535.104.05")
    assert found["python"] == "ok 3.8, /usr/bin/python3"
    assert found["torch"] == "ok 2.1.0a0+fe05266, built for CUDA 12.1"
    assert found["cuda"] == "ok toolkit 12.1.0"
    assert found["driver"] == "ok 535.104.05 here; CUDA 12.1 needs 525.60.13 or later"
    assert found["nccl"] == "ok 2.17.1"
    assert found["apex"] == "ok 0.1, with its compiled parts"
    assert found["megatron-core"] == found["deepspeed"] == "note not there"
    assert "Python 3.10 or later (the image has 3.8), torch 2.9" in found["programs"]


def test_other_images(tmp_path: Path) -> None:
    conda = examine(make_conda(tmp_path / "conda"))
    assert conda["cuda"] == "ok 12.8, without the toolkit (no nvcc)"
    assert conda["nccl"].startswith("note no library of its own; some builds of torch")
    assert conda["driver"].startswith("note no NVIDIA driver on this machine; CUDA 12.8 needs 525")
    assert conda["deepspeed"] == "ok 0.18.2"
    assert conda["programs"].startswith("ok ")
    debian = examine(make_debian(tmp_path / "debian"))
    assert debian["torch"] == "ok 2.13.0+cpu, built without CUDA"
    assert "driver" not in debian and debian["cuda"] == "note not there: for CPUs"
    assert debian["apex"].startswith("note 0.9.10.dev0: not NVIDIA's")
    bare = examine(make_bare(tmp_path / "bare"))
    assert bare["python"].startswith("note none") and bare["torch"] == "note not there"
    assert bare["system"] == "ok Debian GNU/Linux 12 (bookworm)"


@pytest.mark.parametrize(
    ("cuda", "compat", "driver", "status"),
    [
        ("12.1", "", "525.60.13", "ok"),
        ("12.1", "", "525.60.12", "fail"),
        ("12.1", "530.30.02", "470.57.02", "warn"),
        ("13.0", "", "580.65.06", "ok"),
        ("11.8", "", "450.36", "fail"),
        ("99.0", "", "580.65.06", "note"),
        ("12.1", "", "", "note"),
    ],
)
def test_cuda_is_held_against_the_driver(cuda: str, compat: str, driver: str, status: str) -> None:
    row = judge_driver(cuda, compat, driver)
    assert row.status == status
    assert row.remedy or status == "ok" or cuda == "99.0"


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"
        "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.104.05  Release Build\n",
    ],
)
def test_the_driver_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(doctoring, "DRIVER", str(tmp_path / "version"))
    assert doctoring.read_driver() == ""
    (tmp_path / "version").write_text(text)
    assert doctoring.read_driver() == "535.104.05"


def test_the_needs_of_varuna_core_are_those_of_setup_cfg() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    options = setup["options"]
    wanted = {"python": options["python_requires"].removeprefix(">=")}
    extra = setup["options.extras_require"]["train"]
    wanted |= dict(re.findall(r"^(\w+) >=([\d.]+)$", extra, re.MULTILINE))
    assert wanted == RUNTIME
    text = (ROOT / "varuna_core/trace/startup/sitecustomize.py").read_text()
    assert f"needs Python {doctoring.TIMELINE} or later" in text


def test_a_program_that_the_image_is_too_old_for(tmp_path: Path) -> None:
    old = make_nvidia(tmp_path / "root")
    found = judge(tmp_path, old, BUILT_IN)
    assert list(found) == ["program"]
    assert found["program"].status == "fail"
    assert found["program"].text == (
        "pretrain_gpt needs Python 3.10 or later (the image has 3.8), torch 2.9 or later (the "
        "image has 2.1.0a0+fe05266), numpy 1.26 or later (the image has 1.22.2)"
    )
    assert "vjob container build gpu-small" in found["program"].remedy
    (tmp_path / "train.py").write_text("import torch, numpy\nimport local_part\n")
    (tmp_path / "local_part.py").touch()
    assert judge(tmp_path, old, SCRIPT) == {}, "a script that asks for less"


def test_what_a_script_imports(tmp_path: Path) -> None:
    old, new = make_nvidia(tmp_path / "old"), make_conda(tmp_path / "new")
    script = tmp_path / "train.py"
    script.write_text("from varuna_core import trace\nimport os.path, torch\n")
    found = judge(tmp_path, old, SCRIPT)
    assert list(found) == ["program.script"] and found["program.script"].status == "warn"
    assert "imports varuna_core, not found" in found["program.script"].text
    script.write_text(
        "try:\n    import amp_C\nexcept ImportError:\n    amp_C = None\n"
        "from varuna_core import Varuna\nimport flash_attn.layers, flash_attn\n"
    )
    make_tree(tmp_path / "more", {"varuna_core/__init__.py": ""})
    text = change(SCRIPT, env=f"{{PYTHONPATH: {tmp_path / 'more'}}}")
    found = judge(tmp_path, new, text)
    assert found["program.script"].text.startswith("the script imports flash_attn, not found")
    path = tmp_path / "conf.yaml"
    read = load_conf(path)
    rows = judge_conf(read.conf, read.lines, open_image(FolderContents(old), read.conf))
    assert [row.status for row in rows if row.name == "program.script"] == ["fail", "warn"]
    assert "uses varuna_core, which needs Python 3.10" in render(rows)
    script.write_text("print 'of Python 2'\n")
    assert judge(tmp_path, old, SCRIPT) == {}


def test_a_script_that_is_nowhere(tmp_path: Path) -> None:
    root = make_conda(tmp_path / "root")
    conf = "name: n\nprogram: {script: /opt/app/train.py}\n" + GPUS
    assert judge(tmp_path, root, conf)["program.script"].status == "fail"
    mounted = change(conf, container="{image: /i.sqsh, mounts: ['/data:/opt/app:ro']}")
    assert judge(tmp_path, root, mounted) == {}
    make_tree(root, {"opt/app/train.py": "import nothing_such\n"})
    found = judge(tmp_path, root, conf)
    assert "imports nothing_such" in found["program.script"].text, "read in the image"


def test_deepspeed_and_apex(tmp_path: Path) -> None:
    old, new = make_nvidia(tmp_path / "old"), make_conda(tmp_path / "new")
    (tmp_path / "ds.py").write_text("import deepspeed\n")
    conf = "name: n\nprogram: {deepspeed: ds.py}\n" + GPUS
    assert judge(tmp_path, new, conf) == {}
    found = judge(tmp_path, old, conf)
    assert list(found) == ["program"]
    assert found["program"].text == "deepspeed needs deepspeed (the image has none)"
    apex = change(BUILT_IN, train="{optimizer: {apex: true}}")
    found = judge(tmp_path, new, apex)
    assert found["modules"].text == "the image's Python lacks amp_C and apex"
    assert "set it to auto or false" in found["modules"].remedy
    assert "modules" not in judge(tmp_path, old, apex), "which is too old otherwise"
    assert judge(tmp_path, new, change(BUILT_IN, train="{optimizer: {apex: auto}}")) == {}


def make_old_megatron(folder: Path, conf: Path) -> None:
    """A checkout of before Core that knows every option that it would be given."""
    options = list_options(load_conf(conf).conf, Checkout(generation="v2"), replicas=8, world=8)
    flags = "\n".join(f"'{option[0]}'" for option in options)
    make_tree(folder, {"pretrain_gpt.py": "", "megatron/arguments.py": flags})


def test_megatron(tmp_path: Path) -> None:
    old, new = make_nvidia(tmp_path / "old"), make_conda(tmp_path / "new")
    settings = '[project]\nrequires-python = ">=3.10"\n'
    files = {
        "pretrain_gpt.py": "",
        "megatron/training/arguments.py": "",
        "pyproject.toml": settings,
    }
    make_tree(tmp_path / "core", files)
    conf = f"name: n\nprogram: {{megatron: core, args: [ARGS]}}\nmodel: gpt2-small\n{GPUS}"
    conf += "data: {synthetic: true}\n"
    found = judge(tmp_path, old, conf.replace("ARGS", "--seed, 1"))
    assert list(found) == ["program.megatron"]
    assert "the checkout needs Python 3.10 or later (the image has 3.8)" in (
        found["program.megatron"].text
    )
    found = judge(tmp_path, new, conf.replace("ARGS", "--transformer-impl, local"))
    assert "no-gradient-accumulation-fusion" in found["program.args"].remedy
    assert found["program.args"].status == "warn"
    args = "--no-gradient-accumulation-fusion, --transformer-impl=local"
    assert judge(tmp_path, new, conf.replace("ARGS", args)) == {}
    found = judge(tmp_path, new, conf.replace("ARGS", args.partition(",")[0]))
    assert "no transformer-engine" in found["program.args"].text
    before = conf.replace("megatron: core, args: [ARGS]", "megatron: v2")
    before = before.replace("data: {synthetic: true}", "data: {prefix: /data/text}")
    (tmp_path / "conf.yaml").write_text(before)
    make_old_megatron(tmp_path / "v2", tmp_path / "conf.yaml")
    assert judge(tmp_path, old, before) == {}
    assert judge(tmp_path, new, before)["program"].text.startswith("megatron needs apex")


def test_profilers_and_the_timeline(tmp_path: Path) -> None:
    old, new = make_nvidia(tmp_path / "old"), make_conda(tmp_path / "new")
    (tmp_path / "train.py").touch()
    nsys = change(SCRIPT, profile="{nsys: true}")
    assert judge(tmp_path, old, nsys) == {}
    found = judge(tmp_path, new, nsys)
    assert found["profile.nsys"].text == "nsys is not on the image's PATH"
    assert judge(tmp_path, old, change(SCRIPT, profile="{ncu: true}"))["profile.ncu"]
    found = judge(tmp_path, old, change(SCRIPT, profile="{timeline: true}"))
    assert found["profile.timeline"].status == "warn"
    assert "needs Python 3.9 or later (the image has 3.8)" in found["profile.timeline"].text
    assert judge(tmp_path, new, change(SCRIPT, profile="{timeline: true}")) == {}


def test_compilers_gpus_and_trackers(tmp_path: Path) -> None:
    conda, debian = make_conda(tmp_path / "conda"), make_debian(tmp_path / "debian")
    (tmp_path / "train.py").touch()
    compiled = change(BUILT_IN, train="{compile: true}")
    assert "C compiler" in judge(tmp_path, conda, compiled)["train.compile"].text
    make_tree(conda, {"usr/bin/gcc": ""})
    assert judge(tmp_path, conda, compiled) == {}
    found = judge(tmp_path, debian, SCRIPT)
    assert found["cluster.nodes"].text == (
        "nodes have GPUs, and torch 2.13.0+cpu is a build without CUDA"
    )
    assert judge(tmp_path, debian, SCRIPT.replace("gpus: 8", "ranks: 8")) == {}
    tracked = change(SCRIPT, track="{wandb: {project: p}, mlflow: {experiment: e, uri: file:///m}}")
    found = judge(tmp_path, conda, tracked)
    assert {name: row.status for name, row in found.items()} == {
        "track.wandb": "warn",
        "track.mlflow": "warn",
    }
    make_tree(conda, list_site("opt/conda/lib/python3.11/site-packages", "2.9.1", "12.8",
                               "wandb-0.19.1", "mlflow_skinny-3.1.0"))  # fmt: skip
    assert judge(tmp_path, conda, tracked) == {}


def test_the_ranks_python_and_what_runtimes_need(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    off = make_conda(tmp_path / "off", sets_path=False)
    assert examine(off)["python"] == "note no python3 on the image's PATH"
    found = judge(tmp_path, off, SCRIPT)
    assert found["program.python"].status == "fail"
    assert found["program.python"].remedy == "set program.python: /opt/conda/bin/python3"
    named = SCRIPT.replace("train.py", "train.py, python: /opt/conda/bin/python3")
    assert judge(tmp_path, off, named) == {}
    wrong = named.replace("/opt/conda", "/opt/mamba")
    assert "/opt/mamba/bin/python3 is not in the image" in (
        judge(tmp_path, off, wrong)["program.python"].text
    )
    assert (
        judge(tmp_path, off, change(wrong, container="{image: /i, mounts: ['/m:/opt/mamba']}"))
        == {}
    )
    assert judge(tmp_path, off, change(SCRIPT, env="{PATH: '/opt/conda/bin:/bin'}")) == {}
    pyxis = change(named, container="{image: /i.sqsh, runtime: pyxis}")
    found = judge(tmp_path, off, pyxis)
    assert "vjob's agent runs in the image" in found["container.runtime"].text
    old = make_nvidia(tmp_path / "old")
    assert judge(tmp_path, old, change(SCRIPT, container="{image: /i, runtime: pyxis}")) == {}
    (old / "usr/bin/bash").unlink()
    found = judge(tmp_path, old, change(SCRIPT, container="{image: /i, runtime: pyxis}"))
    assert found["container.runtime"].text == "pyxis needs bash in the image"
    empty = make_tree(tmp_path / "empty", {"etc/x": ""})
    path = tmp_path / "conf.yaml"
    path.write_text(SCRIPT)
    read = load_conf(path)
    rows = judge_conf(read.conf, read.lines, open_image(FolderContents(empty), read.conf))
    assert "no /bin/sh in the image" in render(rows) and "python3 is not on" in render(rows)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctoring, "DRIVER", str(tmp_path / "none"))
    make_nvidia(tmp_path / "root")
    image = "root"
    if shutil.which("mksquashfs"):
        image = squash(tmp_path / "root").name
    (tmp_path / "conf.yaml").write_text(change(BUILT_IN, container=f"{{image: {image}}}"))
    done = run(image)
    assert done.exit_code == 0, done.output
    assert "ok    nccl: 2.17.1\n" in done.output
    done = run("--conf", "conf.yaml")
    assert done.exit_code == 1
    assert "fail  program: pretrain_gpt needs Python 3.10" in done.output
    found = json.loads(run(image, "--conf", "conf.yaml", "--json").stdout)
    assert (found["format"], found["torch_cuda"], found["driver"]) == (1, "12.1", "")
    assert found["packages"]["apex"] == "0.1"
    (row,) = [row for row in found["findings"] if row["status"] == "fail"]
    assert row["name"] == "program" and row["remedy"]


def test_what_cannot_be_examined_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf.yaml").write_text(SCRIPT)
    (tmp_path / "image.sif").write_text("of another kind")
    for words, said in (
        ((), "give IMAGE or --conf"),
        (("--conf", "conf.yaml"), "conf.yaml has no container.image"),
        (("nothing-such",), "there are none"),
        (("image.sif",), "is not a squashfs image; .* unpack it"),
    ):
        done = run(*words)
        assert done.exit_code == 2 and re.search(said, done.output), done.output


def test_a_finding_fits_eighty_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VJOB_WIDTH", "80")
    make_nvidia(tmp_path / "root")
    (tmp_path / "conf.yaml").write_text(BUILT_IN)
    lines = run("root", "--conf", "conf.yaml").output.splitlines()
    assert max(len(line) for line in lines[1:]) <= 80
    assert any(line.startswith("      ") for line in lines), "remedies and what goes on"

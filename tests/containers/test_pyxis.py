"""pyxis: srun's options as text, an agent that is inside already, and all of it for real.

The real tests need the Slurm lab with pyxis built for its Slurm:
VJOB_LAB_PYXIS=/path/to/spank_pyxis.so pytest -m pyxis
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cluster.lab import Lab
from tests.command import PROGRAMS, Vjob, read_out
from tests.jobs.confs import SINGLE, make_conf, make_plan
from tests.varuna_core.agent.local_run import Stage, make_container, make_group, shell
from tests.varuna_core.agent.local_run import make_plan as make_agent_plan
from varuna_core.agent.setup.container import leave_step
from varuna_core.records.exits import NOT_READY
from varuna_core.records.nodes import read_report
from vjob.containers.pyxis import INSIDE, Pyxis
from vjob.containers.runtime import ImageKind, Mount, Request, Unsuitable
from vjob.jobs.conf.schema import Container
from vjob.jobs.errors import InputError

REQUEST = Request(
    run="run-1",
    image="/shared/a b.sqsh",
    kind=ImageKind.SQUASHFS,
    mounts=(Mount(source="/s", target="/t", read_only=True),),
    workdir="/work",
    writable=True,
    remap_root=False,
    reuse="auto",
    gpus=False,
    user_id=1000,
    scratch="/tmp",
    stamp="1",
)


def plan_step(**changes: Any) -> tuple[str, ...]:
    return Pyxis().plan(replace(REQUEST, **changes)).step


def test_nothing_that_a_site_could_set_is_left_to_it() -> None:
    assert plan_step() == (
        "--export=VJOB_RUN,VJOB_GROUP,VJOB_ATTEMPT,HOME,USER,LOGNAME,ENROOT_LOGIN_SHELL",
        "--container-image=/shared/a b.sqsh",
        f"--container-mounts=/s:/t:ro,/dev/null:{INSIDE}",
        "--container-workdir=/work",
        "--container-writable",
        "--no-container-remap-root",
        "--no-container-mount-home",
        "--no-container-entrypoint",
    )
    others = plan_step(writable=False, remap_root=True)
    assert {"--container-readonly", "--container-remap-root"} <= set(others)


def test_a_name_stays_on_the_node_only_where_the_conf_asks_for_it() -> None:
    """One whose unpacking was killed is taken for whole by the next job."""
    for reuse in (False, "auto"):
        assert not [word for word in plan_step(reuse=reuse) if "name" in word]
    (name,) = [word for word in plan_step(reuse=True) if "name" in word]
    assert name.startswith("--container-name=vjob-") and name.endswith(":no_exec")
    assert name in plan_step(reuse=True, stamp="2"), "true takes what an older image left"


@pytest.mark.parametrize(
    ("image", "wanted"),
    [
        ("nvcr.io#nvidia/pytorch:25.01-py3", "docker://nvcr.io#nvidia/pytorch:25.01-py3"),
        ("docker://nvcr.io/nvidia/pytorch:25.01", "docker://nvcr.io#nvidia/pytorch:25.01"),
        ("docker://ubuntu:24.04", "docker://ubuntu:24.04"),
        ("dockerd://mine:1", "dockerd://mine:1"),
    ],
)
def test_a_registry_is_written_as_enroot_reads_it(image: str, wanted: str) -> None:
    assert f"--container-image={wanted}" in plan_step(image=image, kind=ImageKind.REFERENCE)


@pytest.mark.parametrize("image", ["docker://", "podman://mine:1", "oras://x/y"])
def test_a_reference_that_pyxis_does_not_take_is_refused(image: str) -> None:
    with pytest.raises(Unsuitable):
        plan_step(image=image, kind=ImageKind.REFERENCE)


@pytest.mark.parametrize("sign", [",", ":", '"', "$", "`"])
def test_a_path_that_pyxis_cannot_say_is_refused_by_name(sign: str) -> None:
    for mount in (Mount(source=f"/a{sign}b", target="/t"), Mount(source="/s", target=f"/a{sign}b")):
        with pytest.raises(Unsuitable, match="pyxis cannot mount"):
            plan_step(mounts=(mount,))


@given(st.text(st.characters(blacklist_characters=',:"$`\0', blacklist_categories=("Cs",))))
def test_any_other_path_is_said_as_it_is(name: str) -> None:
    mounts = (Mount(source=f"/{name}", target=f"/data/{name}"),)
    assert f"--container-mounts=/{name}:/data/{name},/dev/null:{INSIDE}" in plan_step(mounts=mounts)


def make_pyxis_plan(scheduler: str = "slurm", **changes: Any) -> Any:
    container = Container(runtime="pyxis", image="/img/a.sqsh", **changes)
    conf = replace(make_conf(SINGLE), container=container)
    return make_plan(conf, scheduler=scheduler, image_kind=ImageKind.SQUASHFS)


def test_the_agent_looks_for_what_it_can_see_inside() -> None:
    assert make_pyxis_plan(mounts=("/only/on/nodes:/data",)).must_exist == (
        "/data",
        "/home/u/exp/train.py",
        "/home/u/exp",
    )
    assert make_pyxis_plan(workdir="/opt/work").must_exist[-1] == "/opt/work"


def test_a_conf_that_pyxis_cannot_run_is_the_users_to_mend() -> None:
    with pytest.raises(InputError, match="cannot mount '/a,b'"):
        make_pyxis_plan(mounts=("/a,b:/data",))
    with pytest.raises(InputError, match="srun starts the container"):
        make_pyxis_plan("local")


def test_a_run_folder_with_a_colon_is_not_cut_there() -> None:
    """Mounts of our own were once made from `source:target` text."""
    conf = replace(make_conf(SINGLE), container=Container(runtime="enroot", image="/img/a.sqsh"))
    plan = make_plan(conf, "a:b", image_kind=ImageKind.SQUASHFS)
    assert "/log/a:b /log/a:b none" in plan.containers[0].prepare[-1][-1]


def test_what_came_along_from_the_node_does_not_reach_the_ranks() -> None:
    own = {
        **{name: "x" for name in ("SLURM_NODEID", "SLURM_GTIDS", "PMI_RANK", "ENROOT_X")},
        **{name: "x" for name in ("PWD", "OLDPWD", "SHLVL", "_", "SRUN_DEBUG", "SPANK_A")},
        "FROM_IMAGE": "kept",
        "PYTHONPATH": "/of/the/image",
        "TMPDIR": "/of/a/prolog",
        "HOME": "/home/me",
        "SLURM_JOB_ID": "7",
    }
    left = leave_step(own, lambda path: path == "/")
    assert left.pop("PATH").startswith("/usr/local/sbin:")
    assert left.pop("SLURM_JOB_ID") == "7", "the ranks are told of their job"
    assert left == {"FROM_IMAGE": "kept", "PYTHONPATH": "/of/the/image", "HOME": "/tmp"}
    kept = leave_step({**own, "PATH": "/conda"}, lambda path: True)
    assert (kept["PATH"], kept["HOME"], kept["TMPDIR"]) == ("/conda", "/home/me", "/of/a/prolog")


@pytest.fixture
def make_stage(tmp_path: Path) -> Iterator[Callable[..., Stage]]:
    stages = []

    def make(**changes: Any) -> Stage:
        container = replace(make_container(), start=(), step=("--x",), workdir="/usr", **changes)
        command = shell('echo "$PWD $NOTE ${SLURM_THING-out} $RANK"')
        plan = make_agent_plan(
            make_group("a", 1, 2), command=command, containers=(container,), env={"NOTE": "ours"}
        )
        stages.append(Stage(tmp_path / "run", plan))
        return stages[-1]

    yield make
    for stage in stages:
        stage.end()


def test_an_agent_inside_starts_ranks_directly(
    make_stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_THING", "leaked")
    monkeypatch.setenv("NOTE", "of the image")
    stage = make_stage()
    codes, outcome = stage.play()
    assert (codes, outcome.code) == ([0], 0), outcome
    assert sorted(stage.log("n0", "out").splitlines()) == [
        "0: /usr ours out 0",
        "1: /usr ours out 1",
    ]
    report = read_report(stage.attempt, 0)
    assert report is not None and {"NOTE", "RANK"} <= set(report.environment)
    assert "SLURM_THING" not in report.environment


def test_a_node_without_the_plugin_is_said_and_runs_no_rank(
    make_stage: Callable[..., Stage],
) -> None:
    """Its slurmd ignores the options, and starts the agent bare."""
    stage = make_stage(probe=Pyxis().plan(REQUEST).probe)
    codes, outcome = stage.play()
    assert (codes, outcome.code) == ([NOT_READY], NOT_READY)
    assert "slurmd has no pyxis on this node" in outcome.reason


CONF = """
name: boxed
program: {{script: {script}, args: ["a b", "$(id)"]}}
cluster:
  scheduler: slurm
  walltime_min: 5
  grace_s: 1
  nodes: [{{group: pair, count: 2, queue: gpu2, ranks: 2, gpus: "a10:2"}}]
container:
  runtime: pyxis
  image: {image}
{more}
env: {{NOTE: {note}, MY_TOKEN: t0ken, ENROOT_X: "1", NVIDIA_VISIBLE_DEVICES: void}}
"""
NOTE = "two\nlines $HOME `id` 'q' \"d\" \\ ünï  "

for_real = [
    pytest.mark.slurm,
    pytest.mark.pyxis,
    pytest.mark.skipif(
        not os.environ.get("VJOB_LAB_PYXIS"), reason="VJOB_LAB_PYXIS names no spank_pyxis.so"
    ),
]


class Site:
    """A user of a cluster with pyxis."""

    def __init__(self, lab: Lab, folder: Path, image: Path) -> None:
        if not lab.paths.plugstack_conf.exists():
            pytest.skip("the lab that is up was started without VJOB_LAB_PYXIS")
        self.lab, self.image = lab, image
        folder.mkdir()
        self._roots_before = self._list_roots()
        self.vjob = Vjob(folder, {**lab.env, "MY_SECRET": "s3cret of the shell"})

    def submit(self, more: str = "", program: str = "container_view.py") -> Any:
        shutil.copy(PROGRAMS / program, self.vjob.folder)
        image, note = json.dumps(str(self.image)), json.dumps(NOTE)
        text = CONF.format(script=program, image=image, more=more, note=note)
        run = self.vjob.submit(text)
        self.vjob.wait_over(run)
        return run

    def look(self, more: str = "") -> list[dict[str, Any]]:
        run = self.submit(more)
        rows = [json.loads(line) for line in read_out(run).splitlines()]
        assert len(rows) == 4, self.vjob.explain(run)
        return sorted(rows, key=lambda row: int(row["rank"]))

    def roots(self) -> set[str]:
        """Containers that our runs have left on the nodes."""
        return self._list_roots() - self._roots_before

    def _list_roots(self) -> set[str]:
        folders = (self.lab.paths.node(node) for node in self.lab.nodes)
        return {path.name for folder in folders for path in folder.glob("local/enroot/data/*")}


@pytest.fixture
def site(clean_lab: Lab, tmp_path: Path, image: Path) -> Site:
    return Site(clean_lab, tmp_path / "of me", image)


def real(test: Any) -> Any:
    for mark in for_real:
        test = mark(test)
    return test


@real
def test_ranks_see_the_image_and_what_vjob_passes_and_nothing_else(
    site: Site, tmp_path: Path
) -> None:
    shared = tmp_path / "a b's \\"
    shared.mkdir()
    (shared / "file").write_text("shared")
    rows = site.look(f"  mounts: [{json.dumps(f'{shared}:/data/x y:ro')}]\n")
    for row in rows:
        env = row["env"]
        assert (env["NOTE"], env["FROM_IMAGE"], env["PATH"]) == (
            NOTE,
            "made of dough",
            "/usr/bin:/bin",
        )
        assert (env["ENROOT_X"], env["MY_TOKEN"]) == ("1", "t0ken")
        assert not {"MY_SECRET", "LEAK_OF_THE_SHELL", "VJOB_ENTER", "OLDPWD"} & set(env)
        strange = ("SLURM", "SPANK", "PMI", "PYXIS", "ENROOT_LOGIN", "LC_")
        assert not [name for name in env if name.startswith(strange)]
        assert row["args"] == ["a b", "$(id)"]
        assert row["cwd"] == str(site.vjob.folder)
        assert env["CUDA_VISIBLE_DEVICES"] == "0,1"
        assert row["data"] == "shared" and row["shm"]
        assert row["writes_root"] and row["writes_tmp"]
    assert site.roots() == set(), "pyxis removes what has no name"


@real
def test_the_root_may_be_read_only_and_the_user_shown_as_root(site: Site) -> None:
    here = json.dumps(f"{site.vjob.folder}:{site.vjob.folder}")
    rows = site.look(
        f"  writable: false\n  remap_root: true\n  workdir: /home\n  mounts: [{here}]\n"
    )
    assert {(row["uid"], row["writes_root"], row["writes_tmp"]) for row in rows} == {
        (0, False, True)
    }
    assert {row["cwd"] for row in rows} == {"/home"}


@real
def test_a_reused_container_stays_and_is_entered_again(site: Site) -> None:
    site.look("  reuse: true\n")
    (name,) = site.roots()
    assert name.startswith("pyxis_vjob-")
    site.look("  reuse: true\n")
    assert site.roots() == {name}


@real
def test_a_program_that_is_not_in_the_container_is_found_by_preflight(site: Site) -> None:
    """container.workdir turns the mount of the conf's folder off; the agent is inside and looks."""
    record = json.loads(site.submit("  workdir: /home\n").record.read_text())
    assert f"{site.vjob.folder}/container_view.py: No such file" in record["message"]


@real
@pytest.mark.parametrize(
    ("more", "word"),
    [
        ("  mounts: ['/no/such:/data']\n", "source path does not exist: /no/such"),
        ("  workdir: /no/such\n", "couldn't chdir to /no/such"),
    ],
)
def test_what_pyxis_says_is_in_the_schedulers_log(site: Site, more: str, word: str) -> None:
    run = site.submit(more)
    record = json.loads(run.record.read_text())
    assert record["verdict"] != "COMPLETED"
    assert "before any agent reported" in record["message"]
    assert word in run.scheduler_log(None).read_text()

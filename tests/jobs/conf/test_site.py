"""A site's file: defaults under a conf, locked keys, queues to choose from, and what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from jsonschema import Draft202012Validator

from tests import ROOT
from vjob.jobs.conf.json_schema import build_site_schema
from vjob.jobs.conf.loading.choose_queue import choose_queue
from vjob.jobs.conf.loading.load import ReadConf, load_conf, require_valid
from vjob.jobs.conf.loading.site import list_origins
from vjob.jobs.conf.schema import NodeGroup, Queue
from vjob.jobs.errors import ConfError, InputError
from vjob.jobs.planning.resolve_auto import resolve_conf
from vjob.jobs.schedulers.choose import choose_for
from vjob.jobs.schedulers.slurm.nodes import parse_queues
from vjob.jobs.submit.preview import describe_preview, render_preview
from vjob.jobs.submit.submit import prepare
from vjob.shelf.commands.cli import cli
from vjob.shelf.doctor.doctor import examine_site

SCRIPT = "name: a\nprogram: {script: t.py}\n"
SITE = """\
message: Maintenance on Friday.
defaults:
  cluster: {account: physics, sbatch: {constraint: ib}}
  container: {scratch: /scratch}
  env: {NCCL_SOCKET_IFNAME: ib0}
locked:
  cluster.account: All jobs are charged to physics; ask the help desk for another.
  cluster.requeue: Jobs are never requeued here.
queues:
  short: {gpus: "a100:4", walltime_min: 1h}
  gpu1: {gpus: "a100:4", memory_gb: 62, walltime_min: 2d}
clusters:
  alpha: {hosts: [login*.alpha], defaults: {cluster: {qos: normal}}}
  beta: {hosts: ['beta?'], message: Beta is new.}
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "site.yaml").write_text(SITE)
    return {"VJOB_SITE": str(tmp_path / "site.yaml"), "HOME": str(tmp_path)}


def write_own(environ: Mapping[str, str], text: str) -> Path:
    path = Path(environ["HOME"], ".config", "vjob", "site.yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def read(environ: Mapping[str, str], more: str = "", *overrides: str) -> ReadConf:
    folder = Path(environ["HOME"])
    (folder / "t.py").touch()
    (folder / "conf.yaml").write_text(SCRIPT + more)
    return load_conf(folder / "conf.yaml", overrides, environ)


def refuse(environ: Mapping[str, str], more: str = "", *overrides: str) -> list[str]:
    with pytest.raises(ConfError) as caught:
        require_valid(read(environ, more, *overrides), environ=environ)
    folder = environ["HOME"]
    return [str(problem).replace(f"{folder}/", "") for problem in caught.value.problems]


def test_defaults_count_where_the_conf_says_nothing(environ: dict[str, str]) -> None:
    write_own(environ, "defaults: {notify: {mail: me@here}, env: {NCCL_SOCKET_IFNAME: eth0}}\n")
    more = "cluster: {sbatch: {licenses: x}}\nenv: {A: b}\ncontainer: {image: i.sqsh}\n"
    conf = read(environ, more).conf
    assert conf.cluster.account == "physics" and conf.container.scratch == "/scratch"
    assert conf.cluster.sbatch == {"constraint": "ib", "licenses": "x"}
    assert conf.env == {"NCCL_SOCKET_IFNAME": "eth0", "A": "b"}
    assert conf.notify.mail == "me@here"
    assert read(environ, "env: {NCCL_SOCKET_IFNAME: ib1}\n").conf.env["NCCL_SOCKET_IFNAME"] == "ib1"
    set_in_words = read(environ, "", "env.NCCL_SOCKET_IFNAME=ib2").conf
    assert set_in_words.env["NCCL_SOCKET_IFNAME"] == "ib2"


def test_a_default_that_does_not_fit_the_conf_is_left_out(environ: dict[str, str]) -> None:
    found = read(environ)
    require_valid(found, environ=environ)  # scratch has no effect without an image
    assert found.conf.container.scratch == "/tmp" and "container.scratch" in found.site.left_out
    assert found.conf.cluster.account == "physics"


def test_a_locked_key_is_refused_in_the_words_of_the_site(environ: dict[str, str]) -> None:
    assert refuse(environ, "cluster: {account: mine}\n", "cluster.requeue=true") == [
        "conf.yaml:3: cluster.account = mine: All jobs are charged to physics; ask the help desk "
        "for another. (site.yaml:7 locks it at physics)",
        "--set: cluster.requeue = True: Jobs are never requeued here. (site.yaml:8 locks it "
        "at false)",
    ]
    require_valid(read(environ, "cluster: {account: physics, requeue: no}\n"), environ=environ)


def test_a_locked_path_or_variable_may_stay_as_it_is(environ: dict[str, str]) -> None:
    Path(environ["VJOB_SITE"]).write_text(
        "defaults: {env: {A: b}}\nlocked: {log_folder: Here., env.A: A is b., env.C: No C.}\n"
    )
    require_valid(read(environ, "env: {B: c, A: b}\n"), environ=environ)
    *said, last = refuse(environ, "env: {A: c, C: d}\nlog_folder: other\n")
    assert last.startswith("conf.yaml:4: log_folder = ") and "Here. (site.yaml:2" in last
    assert said == [
        "conf.yaml:3: env.A = c: A is b. (site.yaml:2 locks it at b)",
        "conf.yaml:3: env.C = d: No C. (site.yaml:2 locks it at no value)",
    ]


def test_a_user_cannot_open_a_lock_nor_make_one(environ: dict[str, str]) -> None:
    path = write_own(environ, "defaults: {cluster: {account: mine}}\n")
    (said,) = refuse(environ)
    assert said.startswith(".config/vjob/site.yaml:1: cluster.account = mine: All jobs are")
    path.write_text("locked: {cluster.qos: mine}\n")
    (said,) = refuse(environ)
    assert said.endswith("only the site file can lock keys")


def test_one_file_serves_several_clusters(environ: dict[str, str]) -> None:
    from vjob.jobs.conf.loading.load import read_text
    from vjob.jobs.conf.loading.site import load_site

    found = {
        host: load_site(environ, read_text, host)
        for host in ("login1.alpha", "beta9.site", "laptop")
    }
    assert [site.cluster for site in found.values()] == ["alpha", "beta", ""]
    assert found["beta9.site"].message == "Beta is new."
    assert found["laptop"].message == "Maintenance on Friday."
    assert "qos" in str(found["login1.alpha"].defaults)
    assert read({**environ, "VJOB_CLUSTER": "alpha"}).conf.cluster.qos == "normal"
    with pytest.raises(InputError, match="VJOB_CLUSTER is gamma, and"):
        read({**environ, "VJOB_CLUSTER": "gamma"})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("- a", "site.yaml:1: a site file must be a mapping of keys"),
        ("a: [", "site.yaml:1: not YAML: "),
        ("mesage: x", 'site.yaml:1: mesage = x: unknown key; did you mean "message"?'),
        ("defaults: 3", "site.yaml:1: defaults: must be a mapping, with the keys of a conf"),
        (
            "defaults:\n  cluster: {acount: x}",
            'site.yaml:2: defaults.cluster.acount = x: unknown key; did you mean "account"?',
        ),
        (
            "defaults: {cluster: {partition: x}}",
            "site.yaml:1: defaults.cluster.partition = x: unknown key; write `queue: x` in a",
        ),
        (
            "clusters:\n  a:\n    defaults: {cluster: {walltime_min: 0}}",
            "site.yaml:3: clusters.a.defaults.cluster.walltime_min = 0: must be at least 1",
        ),
        ("locked:\n  cluster: x", "site.yaml:2: locked.cluster = x: cannot be locked; "),
        ("queues:\n  a: {gpus: a100}", "site.yaml:2: queues.a.gpus = a100: must be a type and"),
        ("queues: {a: {nodes: 0}}", "site.yaml:1: queues.a.nodes = 0: must be at least 1"),
        ("queues: {a: {time: 3}}", "site.yaml:1: queues.a.time = 3: unknown key; "),
    ],
)
def test_a_broken_file_is_told_with_its_line(
    environ: dict[str, str], text: str, problem: str
) -> None:
    Path(environ["VJOB_SITE"]).write_text(text)
    said = refuse(environ)
    assert any(line.startswith(problem) for line in said), said


def test_a_file_that_is_named_must_be_there(environ: dict[str, str]) -> None:
    environ["VJOB_SITE"] += ".old"
    assert refuse(environ) == ["site.yaml.old: cannot be read: No such file or directory"]
    environ["VJOB_SITE"] = ""
    assert read(environ).site.files == {}


def test_the_file_of_the_page_is_right_and_has_the_form_of_the_schema(
    environ: dict[str, str],
) -> None:
    page = (ROOT / "docs/site.md").read_text(encoding="utf-8")
    text = next(one for one in page.split("```text\n") if one.startswith("message:"))
    text = text.partition("```")[0]
    Path(environ["VJOB_SITE"]).write_text(text)
    assert list(read(environ).site.queues) == ["short", "gpu1", "gpu2"]
    validator = Draft202012Validator(build_site_schema())
    for good in (text, SITE):
        assert [one.message for one in validator.iter_errors(yaml.safe_load(good))] == []
    for wrong in ("mesage: x", "defaults: {cluster: {acount: x}}", "queues: {a: {time: 3}}"):
        assert not validator.is_valid(yaml.safe_load(wrong)), wrong


def test_a_broken_file_stops_a_submit_and_no_status(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(environ["HOME"])
    (folder / "conf.yaml").write_text(SCRIPT)
    Path(environ["VJOB_SITE"]).write_text("defaults: [\n")
    monkeypatch.chdir(folder)
    env = {**environ, "XDG_STATE_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
    said = CliRunner().invoke(cli, ["submit", "conf.yaml", "--dry-run"], env=env)
    assert said.exit_code == 2
    said_all = f"{said.output}{said.exception}"
    assert f"1 problem in {folder}/site.yaml:\n  {folder}/site.yaml:2: not YAML" in said_all
    assert CliRunner().invoke(cli, ["status"], env=env).exit_code == 0
    (row,) = examine_site(environ)
    assert row.status == "fail" and f"{folder}/site.yaml:2: not YAML" in row.text


def test_doctor_says_what_came_from_where(environ: dict[str, str]) -> None:
    own = write_own(environ, "defaults: {cluster: {sbatch: {constraint: eth}}}\n")
    rows = {row.name: row.text for row in examine_site(environ)}
    site = environ["VJOB_SITE"]
    assert rows["site"] == (
        f"{site}; defaults cluster.account (line 3), container.scratch (line 4), env (line 5); "
        "locked cluster.account, cluster.requeue"
    )
    assert rows["user"] == f"{own}; defaults cluster.sbatch (line 1)"
    assert rows["queues"] == "for queue: auto, in this order: short, gpu1"
    assert rows["message"] == "Maintenance on Friday."


def test_a_dry_run_says_where_each_value_is_from(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    more = "cluster:\n  scheduler: slurm\n  nodes: [{group: a, queue: auto, gpus: 'a100:2'}]\n"
    path = read(environ, more).path
    monkeypatch.setenv("VJOB_SITE", environ["VJOB_SITE"])
    resolved = resolve_conf(path, [])
    ready = prepare(resolved, for_preview=True)
    head = render_preview(ready).partition("# ----")[0].replace("\n#     ", " ")
    assert f"#   site ({environ['VJOB_SITE']}): cluster.account physics," in head
    assert (
        "chosen: cluster.nodes[0].queue short, the first of the site's queues with a100:2" in head
    )
    assert "default: cluster.hetero auto, " in head
    assert "defaults of the site that do not fit, so they are not used: container.scratch" in head
    origins = describe_preview(ready)["origins"]
    assert origins["cluster.account"] == {
        "value": "physics", "from": "site", "where": f"{environ['VJOB_SITE']}:3",
    }  # fmt: skip
    assert ready.plan.groups[0].queue == "short"
    assert ready.plan.queues == {"a": resolved.queues["a"]}
    assert "#SBATCH --partition=short" in render_preview(ready)


def test_a_run_on_this_machine_gets_no_limit_and_no_queue_of_the_site(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(environ["VJOB_SITE"]).write_text("defaults: {cluster: {walltime_min: 9, account: x}}\n")
    path = read(environ).path
    monkeypatch.setenv("VJOB_SITE", environ["VJOB_SITE"])
    here = resolve_conf(path, [])
    cluster = here.conf.cluster
    assert cluster.walltime_min is None and choose_for(cluster).can.one_host
    assert here.site.left_out == {"cluster.walltime_min"} and "cluster.account" in here.written
    assert resolve_conf(path, ["cluster.scheduler=slurm"]).conf.cluster.walltime_min == 9
    own = resolve_conf(path, ["cluster.walltime_min=7", "cluster.scheduler=local"]).conf
    assert own.cluster.walltime_min == 7
    auto = resolve_conf(path, ["cluster={scheduler: local, nodes: [{queue: auto}]}"])
    assert auto.conf.cluster.nodes[0].queue is None and auto.queues == {}


QUEUES = [
    ("short", Queue(gpus="a100:4", walltime_min=60)),
    ("gpu1", Queue(gpus="a100:4", memory_gb=62, walltime_min=2880, nodes=2)),
    ("gpu2", Queue(gpus=("a10:4", "v100:8"))),
    ("cpu", Queue(cpus=64)),
]


@pytest.mark.parametrize(
    ("asked", "minutes", "queue"),
    [
        ({"gpus": "a100:4"}, 60, "short"),
        ({"gpus": "A100:2"}, 61, "gpu1"),
        ({"gpus": "a10:4"}, 600, "gpu2"),
        ({"gpus": 8}, 60, "gpu2"),
        ({"gpus": "v100:8"}, None, "gpu2"),
        ({"gpus": 1}, None, "short"),
        ({}, 60, "cpu"),
        ({"cpus": 65}, 60, "short"),
        ({"gpus": "a100:4", "count": 3}, 600, ""),
        ({"gpus": "a100:4", "memory_gb": 100}, 600, ""),
        ({"gpus": "h100:1"}, 60, ""),
    ],
)
def test_the_first_queue_that_fits_is_chosen(
    asked: dict[str, object], minutes: int | None, queue: str
) -> None:
    group = NodeGroup(group="g", queue="auto", **asked)  # type: ignore[arg-type]
    if queue:
        assert choose_queue(group, minutes, QUEUES, "the queues")[0] == queue
    else:
        with pytest.raises(InputError, match="none of the queues has"):
            choose_queue(group, minutes, QUEUES, "the queues")


def test_a_choice_says_why_the_queues_before_it_did_not_fit() -> None:
    group = NodeGroup(group="g", queue="auto", gpus="a10:4", count=2, memory_gb=30)
    assert choose_queue(group, 120, QUEUES, "the site's queues")[1] == (
        "the first of the site's queues with a10:4 and 30 GiB a node, 2 nodes for 120 min (short "
        "has a100:4; gpu1 has a100:4)"
    )
    with pytest.raises(InputError) as caught:
        choose_queue(NodeGroup(group="g", gpus="h100:1"), 60, QUEUES, "the site's queues")
    assert str(caught.value).splitlines()[1:] == [
        "  short has a100:4",
        "  gpu1 has a100:4",
        "  gpu2 has a10:4 and v100:8",
        "  cpu has no GPUs",
    ]
    with pytest.raises(InputError, match="the queues are not known"):
        choose_queue(NodeGroup(group="g"), 60, [], "the site's queues")


def test_sinfo_tells_what_a_queue_has() -> None:
    found = parse_queues("""\
gpu1                |up  |2-00:00:00 |gpu:a100:4(S:0-1) |64  |512000 |2 |
all*                |up  |infinite   |gpu:a100:4        |64  |512000 |2 |
all*                |up  |infinite   |gpu:2             |8   |32000  |4 |
old                 |down|infinite   |(null)            |8   |32000  |4 |
cpu                 |up  |10:00      |(null)            |8   |32000  |4 |
""")
    assert found == [
        ("all", Queue(gpus=("a100:4",), cpus=64, memory_gb=500, nodes=6)),
        ("all", Queue(gpus=("2",), cpus=8, memory_gb=31, nodes=6)),
        ("gpu1", Queue(gpus=("a100:4",), cpus=64, memory_gb=500, walltime_min=2880, nodes=2)),
        ("cpu", Queue(gpus=(), cpus=8, memory_gb=31, walltime_min=10, nodes=4)),
    ]
    group = NodeGroup(group="g", gpus=2, cpus=16)  # no node has both
    assert choose_queue(group, 60, found[1:], "the queues")[0] == "gpu1"


def test_each_value_that_the_conf_does_not_write_has_an_origin(environ: dict[str, str]) -> None:
    write_own(environ, "defaults: {notify: {mail: me@here}}\n")
    found = read(environ, "env: {A: b}\ncluster: {walltime_min: 5}\n")
    origins = list_origins(found.conf, found.lines, found.site, {"master": "it fits"})
    assert origins["cluster.account"].source == "site"
    assert origins["cluster.account"].where.endswith("site.yaml:3")
    assert origins["notify.mail"].source == "user"
    assert origins["env.NCCL_SOCKET_IFNAME"].value == "ib0"
    assert origins["cluster.nodes[0].queue"].source == "chosen"
    assert origins["cluster.grace_s"].source == "default"
    absent = {"env.A", "cluster.walltime_min", "cluster.qos", "train.steps", "container.scratch"}
    assert not absent & set(origins)

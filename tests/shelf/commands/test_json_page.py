"""docs/json.md against what the commands print, on runs that are staged for it: each key of the
page is there with its type, and no other."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from tests import ROOT
from tests.command import PROGRAMS, read_out, wait_for
from tests.corpus import make_documents
from tests.documents import get_commands
from tests.jobs.monitor.builders import change_gpus, healthy, make_line, make_outcome, over
from tests.jobs.planning.test_plan_command import CONF, PRICES, put_profile
from tests.jobs.schedulers.slurm.test_commands import ESTIMATES
from tests.jobs.stub_programs import StubPrograms
from tests.shelf.commands.json_pages import Comparison, read_page
from tests.shelf.commands.test_json import read_values
from tests.shelf.elastic.test_autoscale import GROWS, Idle, make_training_run
from tests.test_docs import list_commands
from varuna_core.facts.cause import End, EndCause
from varuna_core.facts.known import Evidence
from varuna_core.records import record
from varuna_core.records.files import lock_file
from varuna_core.records.record import ENDED, read_record
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.elastic.membership import SLOW_ASKED
from vjob.jobs.images.store import NodeStore, Root
from vjob.jobs.monitor.rules.judge import judge
from vjob.jobs.monitor.stacks.group import RankStack, Stacks
from vjob.jobs.schedulers import choose as schedulers
from vjob.shelf.commands.cli import cli
from vjob.shelf.trial.result import Result, Row, Trouble

PAGE = read_page()
TYPED = ("status JOB",)
"""Under these headings stand the fields of types, of which a staged run has only some."""
NOT_STAGED = [("submit, run, profile", name) for name in ("profile", "queue")]
"""A profile takes torch, and minutes; a queue is chosen on Slurm."""
PARTS_NOT_STAGED = ("plans[].expected_s.", "plans[].not_covered[].")
"""The staged profile covers all, and does not say how much its times vary."""
WITHOUT = [
    (),
    ("init",),
    ("completion",),
    ("schema",),
    ("shell",),
    ("guard",),
    ("container",),
    ("data",),
]
"""Print no facts, print JSON always, run what they are told, or are groups of commands."""
SCRIPT = """
name: {name}
program: {{script: {script}, args: {args}}}
cluster: {{scheduler: {scheduler}, walltime_min: 5, nodes: [{{group: m, count: 1, ranks: 2}}]}}
env: {{API_TOKEN: ghp_secretsecretsecretsecretsecretsecret}}
"""
FAILS = """
import os, sys, time
for step in range(1, 4):
    print(f"step {step}/3 loss {3.0 / step}", flush=True)
print("token ghp_secretsecretsecretsecretsecretsecret", flush=True)
if os.environ["RANK"] == "1":
    print("torch.cuda.OutOfMemoryError: CUDA out of memory.", file=sys.stderr, flush=True)
    time.sleep(0.3)
    raise ValueError("this is the end")
"""


@dataclass
class Stage:
    """Runs in a folder of their own, and the commands on them."""

    folder: Path
    printed: dict[str, list[Any]] = field(default_factory=dict)

    def ask(self, title: str, *words: str, code: int = 0) -> list[Any]:
        """Run a command, and keep what it prints under its heading of the page."""
        done = CliRunner().invoke(cli, [*words, "--json"])
        assert done.exit_code == code, (words, done.output, done.exception)
        values = read_values(done.stdout)
        assert values, words
        self.printed.setdefault(title, []).extend(values)
        return values

    def write(self, name: str, script: str, *args: str, scheduler: str = "local") -> str:
        text = SCRIPT.format(name=name, script=script, args=json.dumps(args), scheduler=scheduler)
        (self.folder / f"{name}.yaml").write_text(text)
        return f"{name}.yaml"

    def find(self, name: str) -> RunFolder:
        rows = CliRunner().invoke(cli, ["list", "--all", "--json"])
        return next(
            RunFolder(Path(row["folder"])) for row in json.loads(rows.stdout) if name in row["run"]
        )

    def wait_over(self, name: str) -> None:
        def is_over() -> bool:
            CliRunner().invoke(cli, ["status", name, "--json"])
            found = read_record(self.find(name))
            return found is not None and found.state == ENDED

        wait_for(is_over, 90)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("stage")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
        patch.chdir(folder)
        (folder / "fails.py").write_text(FAILS)
        (folder / "works.py").touch()
        (folder / "traced.py").write_text((PROGRAMS / "traced_steps.py").read_text())
        yield Stage(folder)


def test_every_command_that_prints_facts_takes_json_and_is_on_the_page() -> None:
    for words in list_commands(cli):
        if words in WITHOUT:
            continue
        command: click.Command = cli
        for word in words:
            assert isinstance(command, click.Group)
            command = get_commands(command)[word]
        name = " ".join(words)
        assert any(option.name == "as_json" for option in command.params), name
        assert any(f"{name} " in f"{title.replace(',', ' ')} " for title in PAGE), name


def test_the_kinds_of_events_are_all_in_the_document() -> None:
    text = (ROOT / "docs/events.md").read_text()
    kinds: set[str] = set()
    for path in [*(ROOT / "jobs").rglob("*.py"), *(ROOT / "varuna_core").rglob("*.py")]:
        for call in ast.walk(ast.parse(path.read_text())):
            name = getattr(getattr(call, "func", None), "id", "")
            if isinstance(call, ast.Call) and name == "append_event":
                kinds |= {one.value for one in ast.walk(call.args[1])
                          if isinstance(one, ast.Constant)}  # fmt: skip
    assert {"started", "morph", "preflight"} <= kinds
    kinds |= {record.NO_ROOM, record.CANCEL_ASKED, record.CANCEL_FAILED, SLOW_ASKED}
    assert [kind for kind in sorted(kinds) if f"`{kind}`" not in text] == []


def test_the_keys_of_a_verdict_are_all_on_the_page() -> None:
    comparison = Comparison(PAGE["Verdict"])
    line = make_line("2: RuntimeError: CUDA error: x", node="n000", rank=2, file="n000.err")
    outcome = make_outcome(1, "rank 2 on n000 exited 1", 2, "n000")
    gone = over(healthy(), "FAILED", outcome=outcome, errors=(line,))
    ended = replace(judge(gone), end=End(EndCause.RANK_EXIT, evidence=(Evidence("exit file"),)))
    ended = replace(ended, main=replace(ended.main, cause=EndCause.RANK_EXIT))
    for verdict in (ended, judge(change_gpus(healthy(), "n001", ecc_errors=2))):
        comparison.add(json.loads(json.dumps(verdict.as_json())))
    assert comparison.list_problems() == []


def test_runs(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Submitted, tried, looked at, compared, shared and cleared away."""
    ask = stage.ask
    told = "0.1 s a step"
    with monkeypatch.context() as patch:
        patch.setattr("vjob.jobs.planning.plan_file.describe_promise", lambda plan: told)
        ask("submit, run, profile", "submit", stage.write("fails", "fails.py"))
    conf = stage.write("swept", "traced.py", "12")
    sweep = ("--sweep", "program.args[0]=12,13", "--sweep-name", "lr")
    ask("submit --sweep", "submit", conf, *sweep)
    dry = ("submit", conf, "--dry-run", "--after-any", "fails")
    ask("submit --dry-run, run --dry-run, profile --dry-run", *dry)
    ask("submit --sweep --dry-run", *dry, *sweep[:2])
    script = Path(conf).with_name("launch.sh")
    script.write_text("python traced.py 11\n")
    against = ("--check-against", str(script))
    ask("submit --dry-run --check-against", *dry[:3], *against, code=1)
    found = Trouble(cause="no file", remedy="write it", evidence=("no such file",))
    row = Row(name="starts", text="no", values={"starts": False})
    tried = Result(conf=conf, rows=[row], findings=[found], differs=["one node"], took_s=1.0)
    stage.printed["try"] = read_values(json.dumps(tried.as_json()))
    hang = stage.write("hang", str(PROGRAMS / "fail_as_told.py"), "-1", "hang")
    ask("submit, run, profile", "submit", hang)
    for name in ("fails", "lr-1", "lr-2"):
        stage.wait_over(name)
    ask("list", "list")
    ask("list", "list", "--sweep", "lr")
    ask("status", "status")
    ask("status JOB", "status", "fails", code=10)
    ask("status JOB", "status", "lr-1")
    ask("logs", "logs", "fails")
    ask("logs --errors", "logs", "fails", "--errors")
    ask("logs --errors", "logs", "lr-1", "--errors")
    ask("watch", "watch", "fails", "--every", "1", "--quiet", "--on", "DEAD=exclude", code=10)
    ask("report", "report", "lr-1")
    ask("compare", "compare", "lr-1", "lr-2")
    ask("compare SWEEP", "compare", "lr")
    if shutil.which("py-spy") is not None:
        ask_stacks(stage)
    ask("cancel", "cancel", "hang", "--now")
    group = str(os.getgid())
    name = next(line.split(":")[0] for line in Path("/etc/group").read_text().splitlines()
                if line.split(":")[2] == group)  # fmt: skip
    ask("share --group", "share", "fails", "--group", name)
    ask("share --private", "share", "fails", "--private")
    ask("prune", "prune", "--days", "0", "--all")
    compare(stage)


def ask_stacks(stage: Stage) -> None:
    run = stage.find("hang")
    wait_for(lambda: read_out(run).count("ready") == 2, 60)
    stage.ask("stacks", "stacks", "hang")
    failed = (RankStack(rank=1, node="n", state="D", problem="it waits for a disk"),)
    lost = Stacks(run="hang", world=2, groups=(), failed=failed, silent={"n2": "no answer"})
    stage.printed["stacks"].append(lost.as_json())


def test_plans(stage: Stage) -> None:
    conf = stage.folder / "plan.yaml"
    conf.write_text(CONF)
    put_profile(stage.folder)
    stage.ask("plan", "plan", str(conf), "--limit", "60", *PRICES)
    stage.ask("plan", "plan", str(conf), "--limit", "60", "--set", "parallel.schedule=1f1b")
    compare(stage)


def test_an_elastic_run(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Idle()
    monkeypatch.setattr(schedulers, "get_scheduler", lambda name, run=None: cluster)
    run = make_training_run(make_folder(stage.folder / "elastic"), GROWS)
    stage.ask("grow", "grow", str(run.path), "--count", "1")
    stage.ask("shrink", "shrink", str(run.path), "--count", "1")
    with lock_file(run.morph.tend_lock):
        stage.ask("tend", "tend", str(run.path))
    compare(stage)


def test_slurm_and_this_machine(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = StubPrograms(stage.folder)
    tools.add("sbatch", f"print({ESTIMATES[0]!r}, file=sys.stderr)")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", tools.path)
        conf = stage.write("there", "works.py", scheduler="slurm")
        stage.ask("submit --test-only", "submit", conf, "--test-only")
    done = CliRunner().invoke(cli, ["doctor", "--json"])
    stage.printed["doctor"] = read_values(done.stdout)
    compare(stage)


def test_images(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("mksquashfs") is None or shutil.which("unsquashfs") is None:
        pytest.skip("needs mksquashfs: apt-get install squashfs-tools")
    tree = stage.folder / "tree"
    for name in ("bin/sh", "usr/bin/python3.11", "etc/environment", "etc/os-release"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("A=1\n")
        (tree / name).chmod(0o755)
    built = str(stage.folder / "root.sqsh")
    subprocess.run(["mksquashfs", tree, built, "-all-root", "-quiet"], check=True)
    tools = StubPrograms(make_folder(stage.folder / "tools"))
    copy = f"import shutil; shutil.copyfile({built!r}, "
    tools.add("enroot", copy + "sys.argv[sys.argv.index('--output') + 1])")
    monkeypatch.setenv("PATH", tools.path)
    stage.ask("container import", "container", "import", "docker://debian:12")
    scratch = str(stage.folder / "scratch")
    place = make_folder(NodeStore(scratch, os.getuid()).roots / "vjob-0123456789ab")
    shutil.copytree(tree, place, dirs_exist_ok=True)
    place.parent.parent.chmod(0o700)
    stage.ask("container list", "container", "list", "--scratch", scratch)
    kept = Root(name="k", path="/k", state="in use", image="/i.sqsh", in_place=False,
                is_stale=False, bytes=1, used=1.0)  # fmt: skip
    with monkeypatch.context() as patch:
        find = NodeStore.find_roots
        patch.setattr(NodeStore, "find_roots", lambda self: [*find(self), kept])
        stage.ask("container clean", "container", "clean", "--all", "-n", "--scratch", scratch)
    compare(stage)


def make_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


def test_data(stage: Stage) -> None:
    lines = [json.dumps({"text": text}) + "\n" for text in make_documents(60)]
    (stage.folder / "corpus.jsonl").write_text("".join(lines))
    words = ("corpus.jsonl", "-o", "out/a", "--train", "300", "--append-eod", "--processes", "1")
    stage.ask("data prepare", "data", "prepare", *words)
    compare(stage)


def compare(stage: Stage) -> None:
    """Compare all that was printed so far, and forget it."""
    found, printed = {}, dict(stage.printed)
    stage.printed.clear()
    for title, values in printed.items():
        comparison = Comparison(PAGE[title])
        for value in values:
            comparison.add(value)
        found[title] = [text for text in comparison.list_problems() if not is_known(title, text)]
    assert {title: problems for title, problems in found.items() if problems} == {}


def is_known(title: str, problem: str) -> bool:
    """A key of a type, which is compared above, or one that is not staged."""
    path, _, said = problem.partition(" ")
    if said != "was never printed":
        return False
    is_typed = title in TYPED or (title == "report" and path.startswith("headline."))
    is_typed = is_typed or path.removeprefix("verdict.") in PAGE["Verdict"]
    is_lacking = title == "plan" and path.startswith(PARTS_NOT_STAGED)
    return is_typed or is_lacking or (title, path) in NOT_STAGED

"""CONTRIBUTING's table "Where do I add", followed: one of each is added to a copy of the sources,
by lines put into exactly the files that its row names, and used through the command line."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import ROOT

TABLE = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where do I add")[2].partition("## ")[0]
ROWS = {
    name: re.findall(r"`([\w/]+\.py)`", cell)
    for name, cell in re.findall(r"^\| (an? .+?) \| (.+) \|$", TABLE, re.MULTILINE)
}
SCHEMA = "jobs/conf/schema.py"
CONF = """
name: toy
program: {script: train.py}
cluster: {scheduler: local, nodes: [{group: all, count: 1, ranks: 2}]}
"""
Add = Callable[[str, str, str], None]
Vjob = Callable[..., str]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The sources, as a checkout has them."""
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("shelf", "jobs", "templates", "reports", "containers", "varuna_core", "vjob"):
        shutil.copytree(ROOT / name, tmp_path / "copy" / name, symlinks=True, ignore=ignored)
    (tmp_path / "train.py").touch()
    (tmp_path / "conf.yaml").write_text(CONF)
    return tmp_path / "copy"


@pytest.fixture
def add(copy: Path, request: pytest.FixtureRequest) -> Add:
    """Puts text before a line of a file that the test's row names."""
    row = ROWS[request.node.get_closest_marker("row").args[0]]

    def put(name: str, before: str, text: str) -> None:
        assert name in row or name.endswith("toy.py"), f"{name} is none of {row}"
        path = copy / name
        old = path.read_text() if path.exists() else before
        assert old.count(before) == 1, (name, before)
        path.write_text(old.replace(before, text + before))

    return put


@pytest.fixture
def vjob(copy: Path) -> Vjob:
    def call(*words: str, code: int = 0) -> str:
        return run(copy, str(copy / "vjob/__main__.py"), *words, code=code)

    return call


def run(copy: Path, *words: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=copy.parent,
        env={**os.environ, "PYTHONPATH": str(copy), "XDG_STATE_HOME": str(copy.parent)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_each_row_names_at_most_three_files_that_are_there() -> None:
    assert len(ROWS) == 11
    for name, files in ROWS.items():
        assert 1 <= len(files) <= 3, name
        assert all((ROOT / file).exists() for file in files), name


@pytest.mark.row("a conf key")
def test_a_conf_key_is_one_field(add: Add, vjob: Vjob) -> None:
    field = "    warm_steps: PositiveInt = 3\n    '''Steps that no report counts.'''\n"
    add(SCHEMA, "    log_every: ", field.replace("'''", '"""'))
    assert re.search(r"warm_steps: 3 +# Steps that no report counts", vjob("init"))
    refer = ["--set", "program.args=['${train.warm_steps}']"]
    five = ["--set", "train.warm_steps=5"]
    assert "# ---- batch.sh" in vjob("submit", "conf.yaml", "--dry-run", *five, *refer)
    said = vjob("submit", "conf.yaml", "--dry-run", *five, code=2)
    assert "train.warm_steps = 5: has no effect with program.script: remove it" in said
    said = vjob("submit", "conf.yaml", "--dry-run", "--set", "train.warm_steps=0", code=2)
    assert "train.warm_steps = 0: must be at least 1" in said


@pytest.mark.row("an option of sbatch")
def test_an_option_of_sbatch_is_a_field_and_its_line(add: Add, vjob: Vjob) -> None:
    add(SCHEMA, "    account: ", '    nice: PositiveInt | None = None\n    """Waits longer."""\n')
    add("jobs/schedulers/slurm/header.py", '        "account": ', '        "nice": cluster.nice,\n')
    words = ("--set", "cluster.scheduler=slurm", "--set", "cluster.nice=5")
    assert "#SBATCH --nice=5" in vjob("submit", "conf.yaml", "--dry-run", *words)


@pytest.mark.row("a vendor of accelerators")
def test_a_vendor_is_a_class_and_a_row(add: Add, copy: Path) -> None:
    toy = (
        "from varuna_core.agent.gpu.accelerator import NoAccelerator\n\n\n"
        "class Toy(NoAccelerator):\n    name = 'toy'\n    visible_variable = 'TOY_DEVICES'\n"
    )
    (copy / "varuna_core/agent/gpu/toy.py").write_text(toy)
    row = 'BuiltIn("toy", "Toys.", "varuna_core.agent.gpu.toy:Toy"),\n'
    add("varuna_core/agent/gpu/accelerator.py", '        BuiltIn(\n            "nvidia"', row)
    code = (
        "from varuna_core.agent.gpu.accelerator import choose_accelerator, list_variables\n"
        "print(choose_accelerator().name, list_variables())"
    )
    assert run(copy, "-c", code).startswith("toy ['TOY_DEVICES', 'CUDA_VISIBLE_DEVICES'")


@pytest.mark.row("a scheduler")
def test_a_scheduler_is_a_class_a_row_and_a_name(add: Add, vjob: Vjob, copy: Path) -> None:
    for path in (ROOT / "tests/jobs/schedulers/toy").glob("*.py"):
        shutil.copy(path, copy)
    row = 'BuiltIn("toy", "Toys.", "vjob_toy:ToyScheduler"),\n'
    add("jobs/schedulers/choose.py", '        BuiltIn("slurm"', row)
    add(SCHEMA, '"slurm", "allocation", "local"', '"toy", ')
    said = vjob("submit", "conf.yaml", "--dry-run", "--set", "cluster.scheduler=toy")
    assert "#TOY name=toy" in said


@pytest.mark.row("a schedule")
def test_a_schedule_is_a_maker_a_row_and_a_name(add: Add, vjob: Vjob, copy: Path) -> None:
    add(SCHEMA, '"gpipe", "1f1b"', '"toy", ')
    maker = (
        "def build_toy(num_ranks: int, num_microbatches: int) -> Schedule:\n"
        "    return replace(build_gpipe(num_ranks, num_microbatches), name='toy')\n\n\n"
    )
    generators = "varuna_core/schedule/generators.py"
    add(generators, "def build_one_f_one_b", maker)
    text = (copy / generators).read_text()
    if "import replace" not in text and ", replace" not in text:
        add(generators, "from varuna_core.schedule.actions", "from dataclasses import replace\n")
    registry = "varuna_core/schedule/registry.py"
    row = "ScheduleKind(build=lambda asked: build_toy(asked.num_ranks, asked.num_microbatches))"
    add(registry, '    "gpipe": ', f'    "toy": {row},\n')
    add(registry, "    build_gpipe,\n", "    build_toy,\n")
    vjob("submit", "conf.yaml", "--dry-run", "--set", "parallel.schedule=toy")
    code = (
        "from varuna_core.schedule import compiled, costs, registry, verify\n"
        "made = registry.build_schedule('toy', 2, 4)\n"
        "verify.verify(made, capacity=1)\n"
        "print(made.name, compiled.simulate(made, costs.build_even_costs(2)).makespan)"
    )
    assert run(copy, "-c", code).split()[0] == "toy"


@pytest.mark.row("a container runtime")
def test_a_container_runtime_is_a_class_a_row_and_a_name(add: Add, vjob: Vjob, copy: Path) -> None:
    toy = (
        "from vjob.containers.charliecloud import Charliecloud\n\n\n"
        "class Toy(Charliecloud):\n    name = 'toybox'\n    probe = ('toybox', '--version')\n"
    )
    (copy / "containers/toy.py").write_text(toy)
    add(SCHEMA, '"enroot", "pyxis", "apptainer"', '"toybox", ')
    registry = "containers/registry.py"
    add(registry, "RUNTIMES: ", "from vjob.containers.toy import Toy\n\n")
    add(registry, "Enroot, Charliecloud, Apptainer, Podman, Pyxis, Docker)", "Toy, ")
    (copy.parent / "image").mkdir()
    words = ("--set", "container.runtime=toybox", "--set", "container.image=image")
    said = vjob("submit", "conf.yaml", "--dry-run", *words)
    assert "toybox" in said
    said = vjob("submit", "conf.yaml", "--dry-run", "--set", "container.runtime=boxtoy", code=2)
    assert "toybox" in said


@pytest.mark.row("a program")
def test_a_program_is_a_class_a_row_and_a_name(add: Add, vjob: Vjob) -> None:
    add(SCHEMA, '    "megatron",\n', '    "toy",\n')
    start = "jobs/programs/start.py"
    toy = (
        "class Toy(Starter):\n"
        "    def build_words(\n"
        "        self, conf: JobConf, found: ProgramFiles, folder: str\n"
        "    ) -> tuple[str, ...]:\n"
        "        return (conf.program.path or '', '--toy', *conf.program.args)\n\n\n"
    )
    add(start, "PROGRAMS: ", toy)
    add(start, '    "script": Script(),', '    "toy": Toy(),\n')
    conf = ("--set", "program={toy: train.py, args: [--fast]}")
    assert '"--toy",\n#   "--fast"' in vjob("submit", "conf.yaml", "--dry-run", *conf)


@pytest.mark.row("a verdict")
def test_a_verdict_is_a_rule_and_its_place(add: Add, vjob: Vjob, copy: Path) -> None:
    rule = (
        "def toy(snapshot: Snapshot) -> Verdict | None:\n"
        "    return conclude(Health.SLOW, 'toy', {'what': 'a toy'})\n\n\n"
    )
    add("jobs/monitor/rules/stalled.py", "def lost_node(", rule)
    add("jobs/monitor/rules/judge.py", "    waiting.refused,", "    stalled.toy,\n")
    said = """    "toy": lambda v: f"{v['what']} stands in the way",\n"""
    add("jobs/monitor/rules/words.py", '    "refused": _refused,', said)
    logs = copy.parent / "logs"
    logs.mkdir()
    (logs / "n1.out").write_text("step 1/10 loss 2.0\n")
    said = vjob("status", str(logs), "--once", code=13)
    assert "SLOW" in said and "a toy stands in the way" in said


@pytest.mark.row("a finding of the report")
def test_a_finding_is_a_function_and_its_row(add: Add, vjob: Vjob, copy: Path) -> None:
    pytest.importorskip("pandas")
    toy = (
        "def _on_toys(job: Job, analysis: Analysis) -> Iterator[Finding]:\n"
        "    yield Finding(weight=2, sentence='7 toys.', evidence='counted', key='')\n\n\n"
    )
    findings = "reports/analysis/findings.py"
    add(findings, "MAKERS = (", toy)
    add(findings, "    _on_pipeline,\n", "    _on_toys,\n")
    logs = copy.parent / "logs"
    logs.mkdir()
    (logs / "n1.out").write_text("".join(f"step {n}/10 loss {3 - n / 10}\n" for n in range(10)))
    assert "7 toys." in vjob("report", str(logs), "--text")


@pytest.mark.row("a known line of a failure")
def test_a_known_line_is_a_row(add: Add, vjob: Vjob, copy: Path) -> None:
    row = '    cause("toy", r"the toy broke", "it was old", do("give it a new toy")),\n'
    known = "varuna_core/facts/catalogue/rank_output.py"
    add(known, '    cause(\n        "cuda out of memory",\n', row)
    code = (
        "from varuna_core.facts.remedy import Context\n"
        "from vjob.jobs.monitor.log_lines.errors import classify_line, find_row\n"
        "print(find_row(classify_line('oh: the toy broke')).explain(Context.CONF))"
    )
    assert "give it a new toy" in run(copy, "-c", code)

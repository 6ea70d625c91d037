"""The one-way imports of docs/spine.md, held by reading every import statement."""

from __future__ import annotations

import ast
import configparser
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT

OURS = ("shelf", "jobs", "templates", "containers", "reports", "varuna_core")
"""Folders; all but the last are imported as parts of `vjob`."""
TORCH_FREE = (
    "varuna_core/facts",
    "varuna_core/records",
    "varuna_core/hang",
    "varuna_core/plugins",
    "varuna_core/agent",
    "varuna_core/launch",
    "varuna_core/morph",
    "varuna_core/schedule",
)
MAY_IMPORT = {
    "shelf": {"shelf", "jobs", "templates", "containers", "reports", "varuna_core"},
    "jobs": {"jobs", "templates", "containers", "reports", "varuna_core"},
    "reports": {"reports", "templates", "varuna_core"},
    "varuna_core": {"varuna_core"},
    "containers": {"containers", "varuna_core"},
    "templates": set(),
}
HEAVY = {"torch", "pandas", "plotly", "numpy", "pyarrow"}
STARTS_PROCESSES = {
    "jobs/process.py",
    "varuna_core/agent/processes/process.py",
    "varuna_core/launch/process.py",
}


def imports(path: Path, *, for_types: bool = True) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    hidden = set()
    for block in ast.walk(tree):
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test) and not for_types:
            hidden |= {id(node) for line in block.body for node in ast.walk(line)}
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


def name_folder(name: str) -> str:
    """The top folder that an import name lies in, or the foreign package's name."""
    head, _, rest = name.partition(".")
    return rest.partition(".")[0] if head == "vjob" and rest else head


def files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", OURS)
def test_imports_run_one_way(package: str) -> None:
    for path in files(package):
        ours = {name_folder(name) for name in imports(path)} & set(OURS)
        assert ours <= MAY_IMPORT[package], path


def test_containers_import_the_record_that_they_make_and_nothing_else_of_ours() -> None:
    for path in files("containers"):
        ours = {name for name in imports(path) if name_folder(name) == "varuna_core"}
        assert ours <= {"varuna_core.records.plan"}, path


def test_no_part_imports_the_face_that_leads_to_all_of_them() -> None:
    """`vjob` itself hands out names of its parts: a part that imported it would close a circle."""
    for package in OURS:
        for path in files(package):
            assert "vjob" not in set(imports(path)), path


def test_only_the_torch_free_part_of_varuna_core_is_used_elsewhere() -> None:
    parts = ("facts", "records", "agent", "data", "schedule", "planner", "launch", "functions")
    parts += ("morph.gain", "plugins", "hang")
    allowed = tuple(f"varuna_core.{part}" for part in parts)
    for package in ("shelf", "jobs", "reports"):
        for path in files(package):
            for name in imports(path):
                if name.startswith("varuna_core."):
                    assert name.startswith(allowed), f"{path}: {name}"


def test_only_the_tests_of_benchmarks_import_benchmarks() -> None:
    """Benchmarks use the tests' helpers; the other way round is for what tests a benchmark."""
    for path in files("tests"):
        if path.parent != ROOT / "tests/benchmarks":
            names = [name for name in imports(path) if name.partition(".")[0] == "benchmarks"]
            assert not names, f"{path}: {names}"
    for package in OURS:
        for path in files(package):
            tops = {name.partition(".")[0] for name in imports(path)}
            assert not tops & {"benchmarks", "tests"}, path


def test_heavy_libraries_stay_where_they_belong() -> None:
    homes = {"torch": ("varuna_core",), **dict.fromkeys(("pandas", "plotly", "pyarrow"), "reports")}
    for package in OURS:
        for path in files(package):
            relative = str(path.relative_to(ROOT))
            loaded = imports(path, for_types=False)
            for name in {name.partition(".")[0] for name in loaded} & HEAVY:
                assert relative.startswith(homes.get(name, ("varuna_core", "reports"))), path
                assert not relative.startswith(TORCH_FREE), path


def test_the_data_part_reads_and_writes_without_torch() -> None:
    for path in files("varuna_core/data"):
        for name in imports(path):
            assert name.partition(".")[0] not in HEAVY - {"numpy"}, path
            assert not name.startswith("varuna_core.") or name.startswith(
                ("varuna_core.data", "varuna_core.records")
            ), f"{path}: {name}"


def test_the_planner_imports_the_schedules_and_the_records_alone() -> None:
    for path in files("varuna_core/planner"):
        for name in imports(path):
            assert name.partition(".")[0] not in HEAVY - {"numpy"}, path
            assert not name.startswith("varuna_core.") or name.startswith(
                (
                    "varuna_core.planner",
                    "varuna_core.schedule",
                    "varuna_core.records",
                    "varuna_core.facts",
                )
            ), f"{path}: {name}"


def test_the_agent_and_the_records_use_the_standard_library_alone() -> None:
    allowed = set(sys.stdlib_module_names) | {"varuna_core", "pynvml"}
    for folder in TORCH_FREE:
        for path in files(folder):
            foreign = {name.partition(".")[0] for name in imports(path)} - allowed
            assert not foreign, f"{path}: {foreign}"


def test_facts_import_facts_alone_and_read_as_python_3_8() -> None:
    for path in files("varuna_core/facts"):
        ours = {name for name in imports(path) if name.startswith(("varuna_core", "vjob"))}
        assert all(name.startswith("varuna_core.facts") for name in ours), path
        ast.parse(path.read_text(), feature_version=(3, 8))


VENDOR = ("varuna_core/agent/gpu/", "varuna_core/facts/catalogue/", "containers/", "tests/",
          "benchmarks/", "jobs/monitor/log_lines/known_lines.py")  # fmt: skip
"""Where a vendor of accelerators may be named: its seam, rows of the catalogue, container runtimes
with a switch for it."""


def test_tools_variables_and_devices_of_vendors_are_named_in_one_place() -> None:
    names = re.compile(
        "nvidia[-_]smi|CUDA_VISIBLE_DEVICES|/proc/driver/nvidia|/dev/(nvidia|kfd|dri)|"
        "(rocm|amd|xpu)-smi|(ROCR|HIP)_VISIBLE_DEVICES|ZE_AFFINITY_MASK"
    )
    for path in (path for room in MAY_IMPORT for path in files(room)):
        where = str(path.relative_to(ROOT))
        if not where.startswith(VENDOR):
            assert [x for x in path.read_text().splitlines() if names.search(x)] == [], where


def test_what_calls_functions_needs_submitit_and_nothing_else() -> None:
    allowed = set(sys.stdlib_module_names) | {"varuna_core", "submitit", "cloudpickle"}
    for path in files("varuna_core/functions"):
        foreign = {name.partition(".")[0] for name in imports(path)} - allowed
        assert not foreign, f"{path}: {foreign}"
        ours = {name for name in imports(path) if name.startswith("varuna_core.")}
        rooms = ("functions", "records", "agent.gpu")
        assert all(name.startswith(tuple(f"varuna_core.{room}" for room in rooms)) for name in ours)


def test_processes_start_in_one_module_a_package() -> None:
    """Others may name subprocess' types and errors; they call nothing of it."""
    for package in OURS:
        for path in files(package):
            relative = str(path.relative_to(ROOT))
            if relative in STARTS_PROCESSES:
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    owner = node.func.value
                    if isinstance(owner, ast.Name) and owner.id == "subprocess":
                        raise AssertionError(f"{relative}: subprocess.{node.func.attr}")


def test_help_and_dry_run_import_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "a.py").touch()
    conf = tmp_path / "conf.yaml"
    conf.write_text("name: x\nprogram: {script: a.py}\ncluster: {scheduler: local}\n")
    code = (
        "import sys\n"
        "from vjob.shelf.commands.cli import cli\n"
        f"cli.main(['submit', {str(conf)!r}, '--dry-run'], standalone_mode=False)\n"
        "bad = {'torch', 'pandas', 'plotly', 'numpy', 'pyarrow', 'vjob.reports'}\n"
        "bad &= set(sys.modules)\n"
        "sys.exit(f'imported {bad}' if bad else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


def test_every_data_file_is_listed_for_the_wheel() -> None:
    options = configparser.ConfigParser()
    options.read(ROOT / "setup.cfg")
    for package in OURS:
        name = package if package == "varuna_core" else f"vjob.{package}"
        patterns = options["options.package_data"].get(name, "").replace("\n", " ")
        listed = {
            path
            for text in patterns.split(",")
            for path in (ROOT / package).glob(text.strip() or "-")
        }
        found = {path for path in (ROOT / package).rglob("*.*") if path.is_file()}
        data = {path for path in found if path.suffix not in (".py", ".pyc")}
        assert data <= listed, package


def test_every_package_is_listed_for_the_wheel() -> None:
    listed = (ROOT / "setup.cfg").read_text()
    for package in OURS:
        for init in (ROOT / package).rglob("__init__.py"):
            name = ".".join(init.parent.relative_to(ROOT).parts)
            name = name if package == "varuna_core" else f"vjob.{name}"
            assert f"\n    {name}\n" in listed, name


def test_no_folder_is_imported_under_its_own_name(tmp_path: Path) -> None:
    """A checkout on sys.path has `jobs` and `vjob.jobs`: two modules of one file. Ruff forbids it
    in the code; what vjob itself imports must not do it either."""
    code = (
        "import sys, vjob.shelf.commands.cli, vjob.reports, vjob.containers.registry\n"
        f"print(sorted(set(sys.modules) & set({OURS[:-1]!r})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"
    for name in OURS[:-1]:
        link = ROOT / "vjob" / name
        assert link.is_symlink() and link.readlink() == Path("..", name)


def test_no_file_is_made_through_a_link() -> None:
    """A name that another user may guess, in a folder that they may write, leads elsewhere."""
    found = [
        f"{path.relative_to(ROOT)}: {call[0]}"
        for folder in ("shelf", "jobs", "varuna_core", "reports", "containers")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for call in re.finditer(r"[^\n]*O_CREAT[^\n]*", path.read_text())
        if "O_EXCL" not in call[0] and "O_NOFOLLOW" not in call[0]
    ]
    assert not found, found


def test_no_number_is_told_by_isdigit() -> None:
    """`\xb2` is a digit that `int` refuses; what `isdecimal` takes, `int` takes."""
    for path in (path for room in MAY_IMPORT for path in files(room)):
        assert ".isdigit()" not in path.read_text(), path


SCHEDULERS = {"slurm", "allocation", "local", "ssh", "pbs"}
"""Names in plans."""


def test_no_decision_is_made_by_the_name_of_a_scheduler() -> None:
    """Code asks its `Capabilities`, or the scheduler itself; nobody imports Slurm's room."""
    for package in ("jobs", "shelf", "reports"):
        for path in files(package):
            relative = str(path.relative_to(ROOT))
            if relative.startswith("jobs/schedulers/slurm/"):
                continue
            rooms = [name for name in imports(path) if "schedulers.slurm" in name]
            if relative.startswith("jobs/schedulers/allocation/"):  # steps of Slurm's jobs
                rooms = []
            assert not rooms, f"{path}: {rooms}"
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Compare):
                    words = {
                        one.value for one in ast.walk(node) if isinstance(one, ast.Constant)
                    } & SCHEDULERS
                    assert not words, f"{path}:{node.lineno} compares with {words}"


READERS = (
    "jobs/runs", "jobs/monitor", "jobs/schedulers", "jobs/planning", "jobs/elastic", "jobs/conf",
    "jobs/images", "jobs/api", "jobs/submit", "jobs/reporting", "reports", "shelf/watch",
    "shelf/screen", "shelf/view", "shelf/elastic", "shelf/commands", "varuna_core/records",
    "varuna_core/hang", "shelf/share.py", "shelf/prune.py", "shelf/compare.py",
)  # fmt: skip
"""Rooms that read what others wrote: run folders, logs, traces, tables of Slurm, confs, images."""
READS = {
    "open", "read_text", "read_bytes", "iterdir", "glob", "rglob", "scandir", "listdir", "walk",
    "load", "loads", "safe_load",
}  # fmt: skip
WITHOUT_A_BUDGET = {
    "varuna_core/records/files.py": "it is the reader",
    "jobs/runs/resolved.py": "it is the reader of YAML, of a text that has its budget",
    "reports/load/tables.py": "YAML of a text that has its budget",
    "jobs/submit/like.py": "YAML of a word on the command line",
    "jobs/conf/loading/load.py": "a conf may be a pipe; it has a budget of its own",
    "jobs/monitor/readers/rank_files.py": "names in a folder that is open, 4 MB of each",
    "jobs/images/store.py": "it measures and removes: what cannot be read is an error",
    "shelf/prune.py": "it measures and removes: what cannot be read is an error",
    "shelf/share.py": "it changes modes: what cannot be read is an error",
    "shelf/watch/notify.py": "--webhook may be a pipe",
    "jobs/api/job.py": "a pickle of the caller's own, refused of others",
    "jobs/conf/starters.py": "files of vjob itself",
    "reports/page/document.py": "files of vjob itself",
    "varuna_core/records/checkpoints.py": "so many folders of a store, their files counted",
    "varuna_core/records/logs/step_counts.py": "a rank's own counter of a fixed size, and /proc",
    "varuna_core/records/logs/trace.py": "it opens what it writes",
}


def _list_reads(path: Path) -> Iterator[str]:
    """Calls that read a file or folder, or parse a text, with nothing to stop them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        text = ast.unparse(node)
        name = ast.unparse(node.func)
        owner, _, called = name.rpartition(".")
        is_writer = any(mark in text for mark in ("'a'", "'wt'", "O_CREAT", "O_DIRECTORY"))
        is_own = "dumps(" in text or "render_" in text or owner in ("files", "self", "webbrowser")
        if owner[:1].isupper() or owner.endswith("opener") or is_writer or is_own:
            continue
        if called in READS and (owner or called == "open"):
            yield f"{path.relative_to(ROOT)}:{node.lineno} {name}"


def test_what_others_wrote_is_read_with_a_budget() -> None:
    found = set()
    for room in READERS:
        top = ROOT / room
        for path in [top] if top.suffix else sorted(top.rglob("*.py")):
            reads = list(_list_reads(path))
            relative = str(path.relative_to(ROOT))
            assert not reads or relative in WITHOUT_A_BUDGET, f"{reads}: use records/files.py"
            found |= {relative} if reads else set()
    assert found == WITHOUT_A_BUDGET.keys()


def test_no_number_of_a_text_is_read_without_a_bound() -> None:
    """`int` of `"9" * 5000` raises; `as_whole` does not, and is shorter."""
    for room in READERS:
        top = ROOT / room
        for path in [top] if top.suffix else sorted(top.rglob("*.py")):
            for line in path.read_text().splitlines():
                told = re.search(r"int\((\w+(?:\.\w+)*)\).* if .*\b\1\.isdecimal\(\)", line)
                assert told is None or path.name == "files.py", f"{path}: {line.strip()}"


JUDGES = {"jobs/monitor/readers/node_files.py", "reports/analysis/step_times.py"}
READS_LINES = {
    "jobs/monitor/readers/node_logs.py",
    "reports/load/training_log.py",
    "varuna_core/agent/restarts.py",
    "varuna_core/agent/track/points.py",
    "varuna_core/morph/furthest.py",
}
"""Modules that read lines as steps. The last three only compare the steps of logs with each other:
they run on nodes, or before anything is judged."""


def test_steps_are_judged_in_one_place_and_a_pace_is_told_by_one_property() -> None:
    """Status, list, watch, page and API show the `Progress` that node_files makes, reports that of
    step_times; both ask `judge_steps`."""
    found: dict[str, set[str]] = {"judge_steps": set(), "StepReader": set(), "pace_s": set()}
    for path in (path for package in OURS for path in files(package)):
        name = str(path.relative_to(ROOT))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                found.setdefault(node.func.id, set()).add(name)
            if isinstance(node, ast.FunctionDef) and node.name in ("pace_s", "find_step_s"):
                found["pace_s"].add(name)
    assert found["judge_steps"] == JUDGES
    assert found["StepReader"] == READS_LINES
    assert found["pace_s"] == {"jobs/monitor/model/snapshot.py"}

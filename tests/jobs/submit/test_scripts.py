"""Plan to scripts: golden files whole, shellcheck, and quoting that nothing gets through."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests import ROOT
from tests.jobs.confs import (
    HETJOB,
    IN_PYXIS,
    MACHINES,
    MORPH,
    MORPH_HETJOB,
    MORPH_MACHINES,
    MORPH_SPLIT,
    SINGLE,
    SPLIT,
    make_conf,
    make_plan,
)
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.submit import scripts
from vjob.jobs.submit.scripts import render_batch, render_node, render_scripts

GOLDEN = ROOT / "tests/jobs/golden"
RUN = RunFolder(Path("/home/u/exp/log/plain-20260102-030405"))
LAYOUTS = {
    "single": SINGLE,
    "hetjob": HETJOB,
    "split": SPLIT,
    "restarts": HETJOB.replace("  qos: high", "  restarts: 3\n  requeue: true"),
    "morph": MORPH,
    "morph-hetjob": MORPH_HETJOB,
    "morph-split": MORPH_SPLIT,
    "morph-machines": MORPH_MACHINES,
    "machines": MACHINES,
    "pyxis": SINGLE + IN_PYXIS,
    "pyxis-hetjob": HETJOB + IN_PYXIS,
}


def render_all(text: str, run: RunFolder = RUN) -> dict[str, str]:
    conf = make_conf(text)
    scheduler = "ssh" if conf.cluster.machine_list else "slurm"
    scripts = render_scripts(conf, make_plan(conf, scheduler=scheduler), run)
    files = {run.batch_script(group).name: script for group, script in scripts.batch.items()}
    return {**files, run.node_script.name: scripts.node}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scripts_equal_their_golden_files(layout: str) -> None:
    for name, text in render_all(LAYOUTS[layout]).items():
        golden = GOLDEN / layout / name
        if os.environ.get("VJOB_WRITE_GOLDEN"):
            golden.parent.mkdir(parents=True, exist_ok=True)
            golden.write_text(text)
        assert golden.read_text() == text


@pytest.mark.parametrize("layout", LAYOUTS)
def test_golden_folders_hold_nothing_else(layout: str) -> None:
    names = {path.name for path in (GOLDEN / layout).iterdir()}
    assert names == set(render_all(LAYOUTS[layout]))


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("folder", ["/home/u/log", '/tmp/it\'s $(id) "a"'])
def test_scripts_pass_shellcheck(layout: str, folder: str, tmp_path: Path) -> None:
    for name, text in render_all(LAYOUTS[layout], RunFolder(Path(folder) / "r")).items():
        script = tmp_path / name
        script.write_text(text)
        done = subprocess.run(["shellcheck", script], capture_output=True, text=True, check=False)
        assert done.stdout == ""


@pytest.mark.parametrize("is_writable", [True, False])
def test_compiled_templates_are_kept_where_the_home_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_writable: bool
) -> None:
    home = tmp_path / "cache"
    if not is_writable:
        home.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    expected = render_all(SINGLE)
    for _ in range(2):
        scripts._environment.cache_clear()
        assert render_all(SINGLE) == expected
    assert home.is_file() or list(home.glob("vjob/templates/*"))


def test_a_job_that_may_start_with_fewer_nodes_asks_for_a_range_and_no_tasks() -> None:
    conf = make_conf(MORPH)
    text = render_batch(conf, make_plan(conf), RUN)
    head = text[: text.index("set -euo")]
    assert "#SBATCH --nodes=2-4\n" in head and "ntasks" not in head
    assert '--nodes="$SLURM_JOB_NUM_NODES"\n' in text
    assert '--expected "$SLURM_JOB_NUM_NODES" &' in text
    conf = make_conf(MORPH.replace(", min_nodes: 2", ""))
    text = render_batch(conf, make_plan(conf), RUN)
    assert "#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=1\n" in text and "--expected" not in text


WARNED = """#!/bin/sh
# An agent whose job is warned while it opens the attempt, or while its ranks start.
echo "$*" >>calls
case "$*" in
  *" attempt "*) echo 0 ;;
  *open*) kill -USR1 "$PPID" ;;
  *close*) echo 0 ;;
esac
"""


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("single", "signal --run {run} --attempt 0 --name USR1 --key batch-USR1-1"),
        ("hetjob", "signal --run {run} --attempt 0 --name USR1 --key batch-USR1-1"),
        ("restarts", "signal --run {run} --attempt 0 --name USR1 --key batch-USR1-1"),
        ("morph", "morph manage --run {run} --session 7.0 --heard  USR1 --expected 2"),
    ],
)
def test_a_warning_that_comes_before_all_is_told_once_there_is_somebody_to_tell(
    layout: str, expected: str, tmp_path: Path
) -> None:
    warns = layout == "morph"  # which opens nothing by itself
    for name, text in (("python", WARNED), ("srun", 'kill -USR1 "$PPID"; ' * warns + "sleep 0.5")):
        (tmp_path / name).write_text(text if text.startswith("#!") else f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    conf = make_conf(LAYOUTS[layout])
    plan = replace(make_plan(conf), python=str(tmp_path / "python"))
    text = render_batch(conf, plan, RUN)
    if warns:  # long enough for the warning to be there
        text = text.replace("\nmanager=\n", "\nsleep 0.3\nmanager=\n")
    done = subprocess.run(
        ["bash", "-c", text],
        cwd=tmp_path,
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NUM_NODES": "2",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    calls = (tmp_path / "calls").read_text().splitlines()
    expected = expected.format(run=RUN.path)
    assert [expected in call for call in calls].count(True) == 1, done.stderr


FAILS_TWICE = """#!/bin/sh
# An agent of two attempts that fail, and one that ends well. TERM comes when CALL is made.
shift
calls=$(grep -c "^$1" calls)
echo "$*" >>calls
case "$1 $calls" in
  attempt*) echo 4 ;;
  "close 0") echo 9 5 0 ;;
  "close 1") echo 7 6 0.1 ;;
  close*) echo 0 ;;
  way*) [ "$3" != 143 ] || echo "$WAY" ;;
esac
[ "$1 $calls" != "$CALL" ] || kill -TERM "$BATCH"
"""


@pytest.mark.parametrize(
    ("call", "code", "num_starts", "last", "way"),
    [
        ("", 0, 3, "close --run {run} --attempt 6", ""),
        ("open 0", 9, 1, "close --run {run} --attempt 4", ""),
        ("open 1", 7, 2, "close --run {run} --attempt 5", ""),
        ("close 0", 143, 1, "stop --run {run} --attempt 5 --kind cancel", ""),
        ("close 1", 143, 2, "stop --run {run} --attempt 6 --kind cancel", ""),
        ("close 0", 0, 1, "stop --run {run} --attempt 5 --kind cancel", "requeue"),
        ("close 0", 0, 1, "stop --run {run} --attempt 5 --kind cancel", "leave"),
    ],
)
def test_failed_attempts_are_started_anew_until_the_job_is_told_to_end(
    call: str, code: int, num_starts: int, last: str, way: str, tmp_path: Path
) -> None:
    """The loop of the script; TERM that comes before there is a step reaches it. A job that
    is preempted as it waits is requeued."""
    closes = FAILS_TWICE if call[:4] != "open" else FAILS_TWICE.replace(" 5 0 ;;", " ;;")
    closes = closes if call != "open 1" else FAILS_TWICE.replace(" 6 0.1 ;;", " ;;")
    step = "#!/bin/sh\ntrap 'echo ended >>calls; exit 143' TERM\nsleep 1 &\nwait\n"
    tool = "#!/bin/sh\necho $1 >>tools\n"
    for name, text in (("python", closes), ("srun", step), ("scontrol", tool)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "calls").touch()
    conf = make_conf(LAYOUTS["restarts"])
    plan = replace(make_plan(conf), python=str(tmp_path / "python"))
    done = subprocess.run(
        ["bash", "-c", "export BATCH=$$\n" + render_batch(conf, plan, RUN)],
        cwd=tmp_path,
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "CALL": call,
            "WAY": way,
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    calls = (tmp_path / "calls").read_text().splitlines()
    calls = [line for line in calls if not line.startswith("way ")]
    assert done.returncode == code, done.stderr
    assert [line.partition(" ")[0] for line in calls].count("open") == num_starts
    assert calls[-1].startswith(last.format(run=RUN.path)), calls
    assert ("--called  TERM" in calls[-1]) is call.startswith("open")
    assert (tmp_path / "tools").exists() is (way == "requeue")


@pytest.mark.parametrize(("lives_s", "starts"), [(0, 10), (90, 15)])
@pytest.mark.parametrize("says", ["said", "/dev/full"])
def test_only_managers_that_fail_in_a_row_end_the_job(
    lives_s: int, starts: int, says: str, tmp_path: Path
) -> None:
    """The loop of the script, with a manager that is well at its fifteenth start at the latest;
    the disk of what the script says may be full."""
    text = render_all(MORPH)["batch.sh"]
    loop = text[text.index("failures=0") :]
    loop = loop[: loop.index("\ndone\n") + len("\ndone\n")]
    begin = f"""set -euo pipefail
python=fake run=x session=1.0 calls= SLURM_JOB_NUM_NODES=2
fake() {{ echo >>starts; [ "$(wc -l <starts)" -ge 15 ]; }}
sleep() {{ :; }}
wait() {{ SECONDS=$((SECONDS + {lives_s})); builtin wait "$@"; }}
"""
    with (tmp_path / says).open("w") as said:
        subprocess.run(
            ["bash", "-c", begin + loop], cwd=tmp_path, stderr=said, check=True, timeout=60
        )
    assert len((tmp_path / "starts").read_text().splitlines()) == starts


def test_lines_of_the_conf_leave_the_agents_input_alone(tmp_path: Path) -> None:
    """Over ssh the agent hears by it that whoever started it lives."""
    conf = make_conf(MORPH_MACHINES.replace("module load cuda", "cat > eaten"))
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "got $(cat)"\n')
    python.chmod(0o700)
    plan = replace(make_plan(conf, scheduler="ssh"), python=str(python), workdir=str(tmp_path))
    done = subprocess.run(
        ["bash", "-c", render_node(conf, plan, RUN)],
        input=b"beats",
        env={"PATH": os.environ["PATH"], "VJOB_SESSION": "1.0"},
        capture_output=True,
        check=True,
    )
    assert done.stdout == b"got beats\n" and (tmp_path / "eaten").read_bytes() == b""


def test_rank_zero_is_in_the_first_component_whatever_its_queue() -> None:
    conf = make_conf(HETJOB)
    text = render_batch(conf, make_plan(conf), RUN)
    first, second = text.split("#SBATCH hetjob")
    assert "--partition=gpu1" in first and "--partition=gpu2" in second
    assert "--time=" not in second and "--output" not in second


def test_a_memory_of_zero_asks_for_all_and_none_asks_for_nothing() -> None:
    conf = make_conf(SINGLE)
    assert "#SBATCH --mem=0\n" in render_batch(conf, make_plan(conf), RUN)
    group = replace(conf.cluster.nodes[0], memory_gb=None)
    conf = replace(conf, cluster=replace(conf.cluster, nodes=(group,)))
    assert "--mem" not in render_batch(conf, make_plan(conf), RUN)


def test_requeue_is_always_said() -> None:
    conf = make_conf(SINGLE)
    assert "#SBATCH --no-requeue\n" in render_batch(conf, make_plan(conf), RUN)
    conf = replace(conf, cluster=replace(conf.cluster, requeue=True))
    assert "#SBATCH --requeue\n" in render_batch(conf, make_plan(conf), RUN)


paths = st.text(
    st.characters(blacklist_categories=("Cs",), blacklist_characters="/\0"), min_size=1, max_size=30
)


@settings(max_examples=60, deadline=None)
@given(paths)
@example("$(touch owned)")
@example("a'b\"c`id`\\ \n;&|<>")
@example("-rf")
def test_a_folder_of_any_name_reaches_bash_unchanged(name: str) -> None:
    """The script's own `run=` line is run by bash, and printed back."""
    run = RunFolder(Path("/x") / name)
    conf = make_conf(SINGLE)
    text = render_node(conf, make_plan(conf), run)
    head = text[text.index("run=") : text.index("find_python()")]
    done = subprocess.run(
        ["bash", "-c", head + 'printf %s "$run"'], capture_output=True, check=True, timeout=20
    )
    assert done.stdout == str(run.path).encode()


sbatch_values = st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF), max_size=20)


@given(sbatch_values)
def test_an_sbatch_value_stays_on_its_line_and_in_its_quotes(value: str) -> None:
    conf = make_conf(SINGLE)
    conf = replace(conf, cluster=replace(conf.cluster, sbatch={"reservation": value}))
    text = render_batch(conf, make_plan(conf), RUN)
    lines = [line for line in text.split("\n") if line.startswith("#SBATCH --reservation=")]
    assert len(lines) == 1
    word = lines[0].partition("=")[2]
    if word.startswith('"'):
        inner = word[1:-1].replace('\\"', '"').replace("\\\\", "\\")
        assert inner == value or "\\" in value
    else:
        assert word == value

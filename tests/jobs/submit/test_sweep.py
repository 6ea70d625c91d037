"""Sweeps: their values and rows, what is submitted for them, and what is taken back."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.command import Vjob, read_out, wait_for
from tests.jobs.submit.test_chain import conf
from tests.jobs.submit.test_submit import FakeSlurm
from varuna_core.records.record import read_record
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.conf.yaml_tree import Items, Node, Scalar, Table, parse_tree
from vjob.jobs.errors import InputError
from vjob.jobs.runs.listing import shorten_keys
from vjob.jobs.submit.sweep import (
    MOST_RUNS,
    build_rows,
    find_before,
    list_outputs,
    parse_rows,
    parse_sweep,
    split_values,
)

words = st.from_regex(r"[A-Za-z0-9_.-]{1,8}", fullmatch=True)
texts = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=8)
quoted = st.one_of(
    texts.map(lambda text: "'" + text.replace("'", "''") + "'"), texts.map(json.dumps)
)
plain = st.one_of(words, words.map(lambda text: f"{text}'s"))
values = st.recursive(
    st.one_of(words, quoted),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda items: f"[{', '.join(items)}]"),
        st.lists(inner, min_size=1, max_size=3).map(
            lambda items: "{" + ", ".join(f"k{n}: {item}" for n, item in enumerate(items)) + "}"
        ),
    ),
    max_leaves=5,
)


def read_value(node: Node) -> object:
    if isinstance(node, Scalar):
        return node.text
    if isinstance(node, Items):
        return [read_value(item) for item in node.items]
    assert isinstance(node, Table)
    return {key: read_value(entry.node) for key, entry in node.entries.items()}


@given(st.lists(st.one_of(values, plain), min_size=1, max_size=5))
def test_values_come_apart_as_they_were_joined(items: list[str]) -> None:
    assert split_values(",".join(items), "x") == items
    assert split_values(" , ".join(items), "x") == items


@given(st.lists(values, min_size=1, max_size=5))
def test_yaml_reads_the_same_list_of_values(items: list[str]) -> None:
    """A list in YAML's brackets is cut at the same commas."""
    whole, _ = parse_tree(f"[{', '.join(items)}]", "x")
    parts = [parse_tree(part, "x")[0] for part in split_values(",".join(items), "x")]
    assert read_value(whole) == [read_value(part) for part in parts]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("train.steps", "must be key=value,value"),
        ("=1,2", "must be key=value,value"),
        ("train.steps=", "a value is empty"),
        ("train.steps=1,,2", "a value is empty"),
        ("train.steps=1,2,1", "1 occurs twice"),
        ("name='a", "a quote is not closed"),
        ("betas=[0.9,0.95", "a bracket is not closed"),
    ],
)
def test_a_sweep_that_cannot_be_read_says_why(text: str, word: str) -> None:
    with pytest.raises(InputError, match="--sweep") as raised:
        parse_sweep(text)
    assert word in str(raised.value)


def test_rows_are_the_product_in_the_order_given() -> None:
    rows = build_rows(["a=1,2", "b=x,y"])
    assert [tuple(row.values()) for row in rows] == list(itertools.product("12", "xy"))
    rows = build_rows(["b=x,y"], [{"a": "2"}, {"a": "1", "c": "3"}])
    assert rows == [
        {"a": "2", "b": "x"},
        {"a": "2", "b": "y"},
        {"a": "1", "c": "3", "b": "x"},
        {"a": "1", "c": "3", "b": "y"},
    ]


@pytest.mark.parametrize(
    ("sweeps", "rows", "overrides"),
    [
        (["a=1", "a=2"], [], []),
        (["a=1"], [{"a": "2"}], []),
        (["a=1"], [], ["a=3"]),
        ([], [{"a": "2"}], ["a=3"]),
    ],
)
def test_a_key_that_is_given_twice_is_refused(
    sweeps: list[str], rows: list[dict[str, str]], overrides: list[str]
) -> None:
    with pytest.raises(InputError, match="a is given twice"):
        build_rows(sweeps, rows, overrides)


def test_too_many_runs_are_refused_with_their_number() -> None:
    many = ",".join(map(str, range(40)))
    with pytest.raises(
        InputError, match=f"1600 runs, more than the {MOST_RUNS} allowed.*MaxSubmitJobs"
    ):
        build_rows([f"a={many}", f"b={many}"])


def test_a_file_has_a_run_a_row_and_an_empty_cell_keeps_the_confs_value() -> None:
    text = 'a, b\r\n1,"[2, 3]"\r\n\r\n,x\r\n'
    assert parse_rows(text, "rows.csv") == [{"a": "1", "b": "[2, 3]"}, {"b": "x"}]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "must have a line of keys"),
        ("a,b\n", "must have a line of keys"),
        ("a,a\n1,2\n", "a occurs twice"),
        ("a,\n1,2\n", "a key is empty"),
        ("a,b\n1,2\n1,2,3\n", "row 3 has 3 values for 2 keys"),
        ('a\n"1\n', "this is not CSV"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(text: str, word: str) -> None:
    with pytest.raises(InputError, match=r"^rows\.csv: ") as raised:
        parse_rows(text, "rows.csv")
    assert word in str(raised.value)


def test_options_that_name_an_output_are_known() -> None:
    args = ["--save", "a.pt", "--out_dir=b", "--save=9", "--out", "-q", "--lr", "c", "--output"]
    assert list_outputs(args) == {"--save": "a.pt", "--out_dir": "b"}
    assert list_outputs(["--save", "${run.name}.pt", "--save-every", "5"]) == {}


@given(st.integers(1, 30), st.integers(1, 8), st.data())
def test_at_most_so_many_run_at_once_whatever_order_they_end_in(
    count: int, at_most: int, data: st.DataObject
) -> None:
    waiting, running, over = set(range(count)), set[int](), set[int]()
    while waiting or running:
        ready = {n for n in waiting if over.issuperset(find_before(n, at_most))}
        waiting, running = waiting - ready, running | ready
        assert 1 <= len(running) <= at_most
        ended = data.draw(st.sampled_from(sorted(running)))
        running, over = running - {ended}, over | {ended}
    assert len(over) == count and find_before(count, None) == []


def test_keys_are_shown_by_as_few_parts_as_tell_them_apart() -> None:
    keys = ["train.optimizer.lr", "parallel.pipeline", "train.name", "optimizer.name", "name"]
    assert list(shorten_keys(keys).values()) == [
        "lr", "pipeline", "train.name", "optimizer.name", "name",
    ]  # fmt: skip


@pytest.fixture
def vjob(tmp_path: Path) -> Vjob:
    return Vjob(tmp_path)


def submit(vjob: Vjob, text: str, *options: str) -> list[RunFolder]:
    rows = json.loads(vjob("submit", vjob.write(text), "--json", *options).stdout)
    return [RunFolder(Path(row["folder"])) for row in rows]


def list_rows(vjob: Vjob, name: str) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = json.loads(vjob("list", "--sweep", name, "--json").stdout)
    return rows


def test_a_sweep_on_this_machine_runs_two_at_once_and_is_listed_with_its_values(
    vjob: Vjob,
) -> None:
    runs = submit(vjob, conf("-1", "hang", "catch"), "--sweep", "cluster.grace_s=2,3",
                  "--sweep", "env.SIDE=left,right", "--sweep-name", "sides",
                  "--at-most", "2")  # fmt: skip
    assert [run.name for run in runs] == ["sides-1", "sides-2", "sides-3", "sides-4"]
    for run in runs[:2]:
        wait_for(lambda run=run: "ready" in read_out(run), 30, lambda: vjob.explain(runs[0]))
    rows = list_rows(vjob, "sides")
    assert [row["state"] for row in rows] == ["RUNNING", "RUNNING", "PENDING", "PENDING"]
    assert [row["swept"] for row in rows] == [
        {"cluster.grace_s": grace, "env.SIDE": side} for grace in "23" for side in ("left", "right")
    ]
    lines = vjob("list", "--sweep", "sides").stdout.splitlines()
    assert lines[0].split() == ["JOB", "STATE", "RUN", "grace_s", "SIDE"]
    assert lines[2].split() == ["L2", "RUNNING", "sides-2", "2", "right"]
    options = ("--sweep", "train.seed=1,2", "--sweep-name", "sides")
    assert "a sweep sides already exists" in vjob("submit", "conf.yaml", *options, code=2).stderr
    vjob("cancel", "sides-1")
    wait_for(lambda: "ready" in read_out(runs[2]), 30, lambda: vjob.explain(runs[2]))
    assert list_rows(vjob, "sides")[3]["state"] == "PENDING"
    said = vjob("cancel", "--sweep", "sides").stdout
    assert "3 runs are cancelled, 2 of the runs after they were asked to save" in said
    states = [row["state"] for row in list_rows(vjob, "sides")]
    assert states == ["CANCELLED"] * 4
    assert not runs[3].attempts(), "it did not start as those before it ended"
    assert "over already" in vjob("cancel", "--sweep", "sides", code=2).stderr


def test_no_run_is_submitted_where_one_has_a_problem_and_all_are_told(vjob: Vjob) -> None:
    name = vjob.write(conf("-1", "exit:0"))
    said = vjob("submit", name, "--sweep", "cluster.grace_s=2,x,0", "--sweep", "name=a,b/c",
                code=2).stderr  # fmt: skip
    assert said.startswith("vjob: 5 of 6 runs have problems; nothing was submitted\n")
    assert "grace_s = x: must be a whole number" in said and "grace_s = 0: must be" in said
    both = "cluster.grace_s=2 name=b/c; cluster.grace_s=0 name=b/c"
    assert f"{both}:\n    --set: name = b/c: names a folder" in said
    assert not (vjob.folder / "log").exists()


def test_a_problem_of_the_conf_itself_is_told_once(vjob: Vjob) -> None:
    name = vjob.write(conf("-1", "exit:0") + "nonsense: 1\n")
    said = vjob("submit", name, "--sweep", "cluster.grace_s=2,3,4", code=2).stderr
    assert said.count("nonsense") == 1 and "  all runs:\n    conf.yaml:5: nonsense" in said


def test_a_secret_among_the_values_is_neither_shown_nor_kept(vjob: Vjob) -> None:
    name = vjob.write(conf("-1", "exit:0"))
    options = ("--sweep", "env.MY_TOKEN=hunter2,hunter3", "--sweep-name", "secrets")
    shown = vjob("submit", name, *options, "--dry-run").stdout
    done = vjob("submit", name, *options)
    listed = vjob("list", "--sweep", "secrets").stdout
    assert "hunter" not in shown + done.stdout + done.stderr + listed
    for run in (vjob.folder / "log/secrets-1", vjob.folder / "log/secrets-2"):
        assert "hunter" not in (run / "record.json").read_text()
    vjob("cancel", "--sweep", "secrets", "--now", code=None)


@pytest.mark.parametrize("name", ["last", "L7", "a/b", "-x"])
def test_a_name_that_could_be_taken_for_a_job_is_refused(vjob: Vjob, name: str) -> None:
    options = ("--sweep", "cluster.grace_s=2,3", f"--sweep-name={name}")
    said = vjob("submit", vjob.write(conf("-1", "exit:0")), *options, code=2).stderr
    assert f"--sweep-name {name}: letters, digits" in said


def test_runs_that_write_one_file_are_told_apart(vjob: Vjob) -> None:
    """Three runs of a sweep overwrote one train.pt without a word."""
    text = "{name: x, program: {script: t.py, args: [--save, a.pt]}, cluster: {scheduler: local}}"
    (vjob.folder / "conf.yaml").write_text(text)
    (vjob.folder / "t.py").touch()
    words = ["submit", "conf.yaml", "--dry-run", "--sweep"]
    assert "all runs of the sweep have --save a.pt" in vjob(*words, "env.A=1,2").stderr
    assert "overwrite" not in vjob(*words, "program.args=[--save=a],[--save=b]").stderr
    folder = ("--set", "train.checkpoint.folder=x-${env.A}")
    shared = vjob(*words, "env.B=1,2", *folder, "--set", "env.A=1").stderr
    assert "all runs of the sweep have train.checkpoint.folder" in shared
    assert "train.checkpoint" not in vjob(*words, "env.A=1,2", *folder).stderr


def test_a_dry_run_shows_all_runs_and_the_files_of_the_first(vjob: Vjob) -> None:
    vjob.write("cluster.nodes[0].ranks,cluster.grace_s\n2,\n4,3\n", "rows.csv")
    said = vjob("submit", vjob.write(conf("-1", "exit:0")), "--sweep-file", "rows.csv",
                "--sweep-name", "shapes", "--at-most", "1", "--dry-run").stdout  # fmt: skip
    lines = said.splitlines()
    assert lines[0] == "# Sweep shapes: 2 runs, 1 at most at once"
    assert [line.split()[1:] for line in lines[1:4]] == [
        ["RUN", "ranks", "grace_s", "RANKS", "NODES"],
        ["shapes-1", "2", "-", "2", "1"],
        ["shapes-2", "4", "3", "4", "1"],
    ]
    assert said.count("#!/usr/bin/env bash") == 2 and "# ---- batch.sh" in said
    assert not (vjob.folder / "log").exists()


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    slurm = FakeSlurm(tmp_path / "tools")
    slurm.queue()
    slurm.say(
        "sbatch", f'n=$(cat "{slurm.folder}/n" 2>/dev/null || echo 70); n=$((n + 1)); '
        f'echo $n > "{slurm.folder}/n"; [ ! -e "{slurm.folder}/last" ] || [ $n -le '
        f'"$(cat "{slurm.folder}/last")" ] || {{ echo "sbatch: error: invalid qos" >&2; exit 1; }};'
        "echo $n",
    )  # fmt: skip
    return slurm


@pytest.fixture
def with_slurm(slurm: FakeSlurm, tmp_path: Path) -> Vjob:
    return Vjob(tmp_path, {"PATH": f"{slurm.folder}:{os.environ['PATH']}"})


SWEEP = ("--sweep", "cluster.grace_s=2,3,4,5", "--sweep-name", "graces")
OF_JOBS = ("--sweep", "cluster.walltime_min=2,3,4,5", "--sweep-name", "times")
"""The header of each run differs: they cannot be one array."""


def test_runs_that_ask_for_the_same_are_one_array(with_slurm: Vjob, slurm: FakeSlurm) -> None:
    text = conf("-1", "exit:0", scheduler="slurm")
    first = with_slurm.submit(text)
    runs = submit(with_slurm, text, *SWEEP, "--at-most", "2", "--after", first.name)
    _, call = [line for line in slurm.asked().splitlines() if line.startswith("sbatch")]
    assert "--dependency=afterok:71" in call
    script = (runs[0].path / "array.sh").read_text()
    assert "#SBATCH --array=1-4%2\n" in script and "#SBATCH --job-name=graces\n" in script
    rows = list_rows(with_slurm, "graces")
    assert [row["jobs"] for row in rows] == [[f"72_{number}"] for number in (1, 2, 3, 4)]
    assert [run.name for run in runs] == [f"graces-{number}" for number in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (OF_JOBS, "the sweep's runs ask for different nodes, queues, times or options"),
        (("--sweep", "log_folder=one,two", "--sweep-name", "times"), "scheduler or log_folder"),
    ],
)
def test_a_submit_says_why_a_sweep_is_no_array(
    with_slurm: Vjob, options: Sequence[str], reason: str
) -> None:
    name = with_slurm.write(conf("-1", "exit:0", scheduler="slurm"))
    assert f"(slurm, jobs of their own: {reason}" in with_slurm("submit", name, *options).stdout


def test_an_array_that_slurm_refuses_becomes_jobs(with_slurm: Vjob, slurm: FakeSlurm) -> None:
    said = "sbatch: error: Batch job submission failed: Invalid job array specification"
    slurm.say("sbatch", f"case $* in *array.sh) echo '{said}' >&2; exit 1;; esac; echo $PPID")
    runs = submit(with_slurm, conf("-1", "exit:0", scheduler="slurm"), *SWEEP)
    assert [run.name for run in runs] == [f"graces-{number}" for number in (1, 2, 3, 4)]
    assert all("_" not in str(row["jobs"]) for row in list_rows(with_slurm, "graces"))


def test_a_limit_of_the_account_is_explained_with_the_refusal(
    with_slurm: Vjob, slurm: FakeSlurm
) -> None:
    said = "sbatch: error: AssocMaxSubmitJobLimit\nsbatch: error: Batch job submission failed: Job "
    said += "violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
    slurm.say("sbatch", f"cat >&2 <<'E'\n{said}\nE\nexit 1")
    name = with_slurm.write(conf("-1", "exit:0", scheduler="slurm"))
    said = with_slurm("submit", name, *SWEEP, code=1).stderr
    assert "(MaxSubmitJobs)" in said and "walltime" not in said


def test_slurm_is_told_at_most_how_many_by_dependencies(with_slurm: Vjob, slurm: FakeSlurm) -> None:
    text = conf("-1", "exit:0", scheduler="slurm")
    first = with_slurm.submit(text)
    submit(with_slurm, text, *OF_JOBS, "--at-most", "2", "--after", first.name)
    calls = [line for line in slurm.asked().splitlines() if line.startswith("sbatch")]
    asked = [next((w for w in call.split() if "depend" in w), "") for call in calls]
    ok = "--dependency=afterok:71"
    assert asked == ["", ok, ok, f"{ok},afterany:72", f"{ok},afterany:73"]


def test_a_refused_run_takes_back_those_before_it(with_slurm: Vjob, slurm: FakeSlurm) -> None:
    (slurm.folder / "last").write_text("72")
    name = with_slurm.write(conf("-1", "exit:0", scheduler="slurm"))
    said = with_slurm("submit", name, *OF_JOBS, code=1).stderr
    assert "run 3 of 4 (cluster.walltime_min=4) was not submitted: sbatch refused the job" in said
    assert "The 2 runs before it were withdrawn; no run is left." in said
    cancels = [line for line in slurm.asked().splitlines() if line.startswith("scancel")]
    assert cancels == ["scancel 72", "scancel 71"]
    assert {row["state"] for row in list_rows(with_slurm, "times")} == {"REFUSED"}


def test_jobs_that_cannot_be_taken_back_are_named(with_slurm: Vjob, slurm: FakeSlurm) -> None:
    (slurm.folder / "last").write_text("72")
    slurm.say("scancel", "[ $1 = 71 ]")
    name = with_slurm.write(conf("-1", "exit:0", scheduler="slurm"))
    said = with_slurm("submit", name, *OF_JOBS, code=1).stderr
    assert "except these jobs, still to be cancelled: 72" in said


def test_ctrl_c_ends_between_two_runs_and_says_how_many_go_on(
    with_slurm: Vjob, slurm: FakeSlurm
) -> None:
    """A terminal sends it to sbatch too; the run that is being submitted is finished."""
    slurm.say(
        "sbatch", f'cd "{slurm.folder}"; echo x >> calls; while [ ! -e go ] && '
        '[ "$(wc -l < calls)" = 2 ]; do sleep 0.1; done; echo 77',
    )  # fmt: skip
    name = with_slurm.write(conf("-1", "exit:0", scheduler="slurm"))
    command = [sys.executable, "-m", "vjob", "submit", name, *OF_JOBS]
    child = subprocess.Popen(
        command, cwd=with_slurm.folder, env=with_slurm.env, stderr=subprocess.PIPE, text=True
    )
    calls = slurm.folder / "calls"
    wait_for(lambda: calls.exists() and len(calls.read_text().split()) == 2, 30)
    child.send_signal(signal.SIGINT)
    (slurm.folder / "go").touch()
    _, said = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "interrupted; 2 of 4 runs of times were submitted and continue: `vjob cancel" in said
    rows = list_rows(with_slurm, "times")
    assert len(rows) == 2
    record = read_record(RunFolder(Path(str(rows[1]["folder"]))))
    assert record is not None and record.state == "submitted" and record.jobs


def test_a_hundred_runs_are_listed_with_one_question(with_slurm: Vjob, slurm: FakeSlurm) -> None:
    many = ",".join(map(str, range(1, 101)))
    text = conf("-1", "exit:0", scheduler="slurm")
    runs = submit(with_slurm, text, "--sweep", f"cluster.grace_s={many}", "--sweep-name", "many")
    assert len({run.name for run in runs}) == 100
    row = "{job}|N/A|N/A|RUNNING|n1|None|0|N/A|vjob:x||10:00|N/A|N/A|(null)|0|"
    slurm.queue(*(row.format(job=f"71_{n + 1}") for n in range(100)))
    before = slurm.asked().count("squeue")
    assert {row["state"] for row in list_rows(with_slurm, "many")} == {"RUNNING"}
    assert slurm.asked().count("squeue") == before + 1

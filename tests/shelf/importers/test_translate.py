"""Old shell confs become conf.yaml; what has no counterpart is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests import ROOT
from vjob.jobs.conf.loading.check import check_conf
from vjob.jobs.conf.loading.load import parse_conf, parse_conf_lines
from vjob.jobs.conf.schema import JobConf
from vjob.jobs.conf.slurm_words import WORDS, to_gigabytes, to_minutes, to_node_list
from vjob.jobs.errors import InputError
from vjob.shelf.importers.shell import parse_shell_conf
from vjob.shelf.importers.translate import translate_shell_conf

LAUNCH = "torchrun train.py"
LEGACY = ROOT / "tests/jobs/legacy"


def translate(text: str) -> tuple[JobConf, list[str]]:
    rendered, notes = translate_shell_conf(f"{text}\n{LAUNCH}\n")
    return parse_conf(rendered, "conf.yaml", Path("/old"), environ={}), notes


def parse_values(text: str) -> dict[str, str | None]:
    return {name: found.value for name, found in parse_shell_conf(text).variables.items()}


def test_a_shell_conf_with_its_launch_is_a_conf_that_can_be_read() -> None:
    conf, _ = translate((LEGACY / "mixed.sh").read_text(encoding="utf-8"))
    first, second = conf.cluster.nodes
    assert (first.count, first.queue, first.gpus) == (1, "gpu1", "a100:4")
    assert (second.count, second.queue, second.gpus) == (7, "gpu2", "a10:4")
    parallel, train = conf.parallel, conf.train
    assert (parallel.pipeline, parallel.data, str(parallel.partition)) == (4, 8, "2-4-4-2")
    assert (train.global_batch_size, conf.cluster.walltime_min) == (64, 2160)
    assert conf.model is None and conf.data is None, "no script names one"


@pytest.mark.parametrize("text", ["NNODES=3\nMODEL=small\n", "#SBATCH --nodes=2\necho\n", ""])
def test_scripts_that_start_nothing_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"starts no program; give --from the script that does"):
        translate_shell_conf(text)


@pytest.mark.parametrize(
    ("line", "note"),
    [("RELOAD_CONTAINER=true", True), ("RELOAD_CONTAINER=false", False), ("", False)],
)
def test_a_container_that_was_reloaded_is_told_to_be_unpacked_anew(line: str, note: bool) -> None:
    conf, notes = translate(f"CONTAINER_IMAGE=/a.sqsh\n{line}\n")
    assert any("RELOAD_CONTAINER=true is container.reuse: false" in text for text in notes) is note
    assert conf.container.reuse is {"t": False, "f": True}.get(line.partition("=")[2][:1], "auto")


def test_the_line_of_the_old_scripts_submit_is_kept_with_the_homogeneous_conf() -> None:
    text = (LEGACY / "00_conf.sh").read_text(encoding="utf-8")
    job = "#SBATCH --nodes=8\n#SBATCH --partition=gpu2\n#SBATCH --gres=gpu:a10:4\n"
    conf, _ = translate(job + 'GRES="gpu:a10:4"\n' + text)
    [group] = conf.cluster.nodes
    assert (group.count, group.queue, group.gpus, group.num_ranks) == (8, "gpu2", "a10:4", 4)
    assert conf.cluster.port == 6787


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("A=1", "1"),
        ("A='x y' # comment", "x y"),
        ('A="x # y"', "x # y"),
        ("A=x#y", "x#y"),
        ("export A=1", "1"),
        ("  A=1;", "1"),
        ("B=2; A=$B", "2"),
        ("B=2 A=x${B}y", "x2y"),
        ("B=3\nA=$((B*(2+B) - 1))", "14"),
        ("B=7\nA=$(( $B / 2 ))", "3"),
        ('B=q\nA="$B-${B}"', "q-q"),
        ("A='$B'", "$B"),
        ("A=", ""),
        ("A=1\nA=2", "2"),
        ("A=a\\ b", "a b"),
        ("A=$B", None),
        ("A=$((B * 2))", None),
        ("A=$((1 / 0))", None),
        ("A=$((2 ** 9))", None),
        ('A="$(date)"', None),
        ('A="${B:-3}"', "3"),
        ("B=\nA=${B:-x y}", "x y"),
        ("B=2\nA=${B:-3}", "2"),
        ("B=2\nA=${B-$C}", "2"),
        ("A=${B:-$C}", None),
        ("B=2\nA=${B:+x}", "x"),
        ("B=\nA=y${B:+x}", "y"),
        ("A=y${B:+x}", "y"),
        ("B=\nA=y${B+x}", "yx"),
        ("B=\nA=y${B-x}", "y"),
        ("B=2\nC=3\nA=${B:+x $C}", "x 3"),
        ("B=2\nA=${B:+$C}", None),
        ("A=$(dirname /x/y.sh)", "/x"),
        ("A=1\nA+=2", "12"),
        ("A=1\nA=$A$A", "11"),
        ("A=$A", None),
        ("B=3\nA=(\n  --x 1  # one\n  --y $B\n)", "--x 1 --y 3"),
        ('B=(1 2)\nA="${B[@]}"', "1 2"),
    ],
)
def test_an_assignment_is_worked_out_without_a_shell(line: str, value: str | None) -> None:
    assert parse_values(line)["A"] == value


def test_a_variable_may_be_exported_later_and_one_of_the_shell_only_by_its_name() -> None:
    found = parse_shell_conf("A=1\nB=2\nexport A HOME\n").variables
    assert [(name, one.exported) for name, one in found.items()] == [("A", True), ("B", False)]


@pytest.mark.parametrize(
    "line",
    ["A=$(date)", "A=`date`", "if true; then", "A=1 cmd", "echo x", "A = 1", "A=(1 2", "A=1 &"],
)
def test_a_line_that_is_more_than_assignments_is_handed_back(line: str) -> None:
    found = parse_shell_conf(f"\n{line}\n")
    handed = [*found.not_understood, *((entry.line, entry.raw) for entry in found.commands)]
    assert found.variables == {} and handed == [(2, line)]
    assert f"line 2: not understood, left out: {line}" in translate(f"\n{line}")[1]


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("#SBATCH --nodes=8", ("nodes", "8")),
        ("#SBATCH --nodes 8", ("nodes", "8")),
        ("#SBATCH -N 8  # all", ("nodes", "8")),
        ("#SBATCH -N8", ("nodes", "8")),
        ("#SBATCH --exclusive", ("exclusive", "")),
        ('#SBATCH --comment="a b"', ("comment", "a b")),
    ],
)
def test_an_sbatch_line_is_read(line: str, option: tuple[str, str]) -> None:
    [block] = parse_shell_conf(line).blocks
    assert {name: value for name, (value, _) in block.options.items()} == dict([option])


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("90", 90), ("1:30", 2), ("2:00:00", 120), ("1-0", 1440), ("1-2:30", 1590), ("x", None)],
)
def test_a_time_limit_of_slurm_is_minutes(text: str, minutes: int | None) -> None:
    assert to_minutes(text) == minutes


@pytest.mark.parametrize(
    ("text", "gigabytes"),
    [("0", 0), ("64G", 64), ("2048", 2), ("1500M", 2), ("1T", 1024), ("x", None)],
)
def test_memory_of_slurm_is_gigabytes_rounded_up(text: str, gigabytes: int | None) -> None:
    assert to_gigabytes(text) == gigabytes


def test_a_list_of_nodes_is_parted_outside_brackets() -> None:
    assert to_node_list("n[060,062-064],n070") == ["n[060,062-064]", "n070"]
    assert to_node_list("a b") is None


def test_numbers_that_never_fitted_are_told() -> None:
    _, notes = translate("NNODES=3\nNPROC_PER_NODE=4\nPIPELINE_MP_SIZE=8\nWORLD_SIZE=16\n")
    assert "WORLD_SIZE is 16, but the nodes have 12 ranks" in notes
    assert any(
        note.startswith("parallel.pipeline = 8 is left out: 12 ranks") and "leave 4 over" in note
        for note in notes
    )


def test_a_value_that_cannot_be_used_is_told() -> None:
    conf, notes = translate("MODEL=T5\nDP_SIZE=four\nPARTITION=a\nNSYS=maybe\nFOO=1\n")
    assert conf.model is None and conf.parallel.data == "auto"
    for name in ("MODEL=T5", "DP_SIZE=four", "PARTITION=a", "NSYS=maybe", "FOO=1"):
        assert any(name in note for note in notes), name


def test_a_secret_is_neither_kept_nor_told() -> None:
    rendered, notes = translate_shell_conf(
        f"export HF_TOKEN=hunter2\nAPI_KEY=hunter2\nlogin --token hunter2\n{LAUNCH}"
    )
    assert "hunter2" not in rendered + "".join(notes)
    assert "pass_env: [HF_TOKEN]" in rendered


NAMES = [*parse_shell_conf((LEGACY / "mixed.sh").read_text("utf-8")).variables, "FOO", "RANK"]
OPTIONS = [*WORDS, "constraint", "exclusive"]
VALUES = (
    st.sampled_from(["true", "false", "1", "8", "0", "xl", "gpu:a10:4", "gpu:2", "6787", "1-2", ""])
    | st.text(max_size=8)
    | st.sampled_from(["$((NNODES * 2))", "$FOO", "'a b'", "1:00:00", "10G", "n[1-3],n5"])
)
LINES = (
    st.builds(lambda name, value: f"{name}={value}", st.sampled_from(NAMES), VALUES)
    | st.builds(lambda name, value: f"export {name}={value}", st.sampled_from(NAMES), VALUES)
    | st.builds(lambda name, value: f"#SBATCH --{name}={value}", st.sampled_from(OPTIONS), VALUES)
    | st.text(max_size=20)
)


def test_a_variable_in_quotes_is_no_reference_to_a_key() -> None:
    text, _ = translate_shell_conf(f"export WHERE='${{HOME}}/x $Y'\n{LAUNCH}")
    assert "WHERE: '$${HOME}/x $Y'" in text


@settings(max_examples=200, deadline=None)
@given(st.lists(LINES, max_size=12).map("\n".join))
@example("A=$((" + "(" * 150 + "1")
@example("HOMOGENEOUS_CLUSTER=false\nNNODES=1")
@example("export A='\0'")
def test_any_text_becomes_a_conf_and_every_line_is_used_or_told(text: str) -> None:
    rendered, notes = translate_shell_conf(f"{LAUNCH}\n{text}")
    conf, lines = parse_conf_lines(rendered, "conf.yaml", Path("/old"), environ={})
    assert check_conf(conf, lines, require_paths=False) == []
    assert not any("to correct" in note for note in notes)

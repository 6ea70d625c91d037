"""conf.yaml to JobConf: spellings, YAML's traps, problems with their lines, overrides."""

from __future__ import annotations

import dataclasses
import os
import types
import typing
from pathlib import Path

import pytest

from varuna_core.facts.partition import Partition
from vjob.jobs.conf.document import list_sections
from vjob.jobs.conf.loading.check import check_conf
from vjob.jobs.conf.loading.load import (
    load_conf,
    parse_conf,
    parse_conf_lines,
    read_conf,
    read_text,
)
from vjob.jobs.conf.parse import get_hints, is_scalar
from vjob.jobs.conf.schema import MODELS, JobConf, Model, Program
from vjob.jobs.errors import ConfError

BASE = Path("/conf")
MINIMAL = "name: run\nprogram: {script: train.py}\n"


def parse(text: str, *overrides: str) -> JobConf:
    return parse_conf(text, "conf.yaml", BASE, overrides, environ={"HOME": "/home/me"})


def parse_more(text: str, *overrides: str) -> JobConf:
    return parse(MINIMAL + text, *overrides)


def find_problems(text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfError) as caught:
        parse(text, *overrides)
    return [str(problem) for problem in caught.value.problems]


def find_more(text: str, *overrides: str) -> list[str]:
    return find_problems(MINIMAL + text, *overrides)


def test_a_key_of_earlier_versions_is_read_where_it_asks_for_nothing() -> None:
    """The stored conf of an old run has every key, this one too."""
    assert parse_more("train: {checkpoint: {memory_every: 0}}") == parse(MINIMAL)
    assert parse_more("profile: {traces: null}") == parse(MINIMAL)
    (problem,) = find_more("profile: {traces: /x}")
    assert "unknown key; the report does not read files of torch.profiler" in problem
    (problem,) = find_more("train: {checkpoint: {memory_every: 5}}")
    assert "unknown key; vjob keeps no copies in memory; lower train.checkpoint.every" in problem


def test_the_conf_of_the_design_is_read_as_written() -> None:
    conf = parse("""\
name: gpt2-xl
program: pretrain_gpt
model: gpt2-xl
data: {prefix: data/xl/my-gpt2_text_document, split: "969,30,1"}
train:
  global_batch_size: 64
  precision: fp16
  loss_scale: dynamic
  optimizer: {name: adamw, lr: 1.5e-4, betas: [0.9, 0.95]}
  schedule: {kind: cosine, warmup_steps: 10, min_lr: 1e-5}
  checkpoint: {folder: ckpt, every: 500, keep: 3, local: /scratch}
parallel: {pipeline: 8, data: 4, partition: 0-11-8-8-8-8-5-0}
cluster:
  walltime_min: 120
  account: null
  nodes:
    - {group: master, count: 1, queue: gpu1, gpus: "a100:4"}
    - {group: slave, count: 7, queue: gpu2, gpus: a10:4, cpus: 14, memory_gb: 0, devices: null}
container: {image: pytorch.sqsh, mounts: ["data:/data", ~/x:/x], reuse: auto}
prices: {a100: 32.77, a10: 9}
notify: {}
""")
    assert conf.program == Program(kind="pretrain_gpt")
    assert conf.model == MODELS["gpt2-xl"]
    assert conf.data is not None and conf.data.prefix == "/conf/data/xl/my-gpt2_text_document"
    assert conf.train.optimizer.lr == 1.5e-4 and conf.train.schedule.min_lr == 1e-5
    assert conf.train.checkpoint.folder == "/conf/ckpt"
    assert conf.train.checkpoint.local == "/scratch"
    assert str(conf.parallel.partition) == "0-11-8-8-8-8-5-0"
    assert [group.gpu_type for group in conf.cluster.nodes] == ["a100", "a10"]
    assert [group.num_ranks for group in conf.cluster.nodes] == [4, 4]
    assert conf.container.image == "/conf/pytorch.sqsh"
    assert conf.container.mounts == ("/conf/data:/data", "/home/me/x:/x")
    assert conf.prices == {"a100": 32.77, "a10": 9.0}
    assert conf.log_folder == "/conf/log"


@pytest.mark.parametrize(
    ("spelled", "program"),
    [
        ("pretrain_bert", Program(kind="pretrain_bert")),
        ("{script: t.py}", Program(kind="script", path="/conf/t.py")),
        (
            "{script: /t.py, args: [--lr, 1e-5, on, 010, 'x y'], python: venv/bin/python}",
            Program(
                kind="script",
                path="/t.py",
                args=("--lr", "1e-5", "on", "010", "x y"),
                python="/conf/venv/bin/python",
            ),
        ),
        (
            "{module: pkg.train, args: -a 'b c', launch: srun}",
            Program(kind="module", module="pkg.train", args=("-a", "b c"), launch="srun"),
        ),
        (
            "{command: [accelerate, launch, 1], args: [x]}",
            Program(kind="command", command=("accelerate", "launch", "1"), args=("x",)),
        ),
        (
            """{command: "torchrun train.py 'a b' ''", launch: node}""",
            Program(kind="command", command=("torchrun", "train.py", "a b", ""), launch="node"),
        ),
        (
            "{megatron: ., python: python3}",
            Program(kind="megatron", path="/conf", python="python3"),
        ),
        (
            "{deepspeed: ~/t.py, config: ds.json}",
            Program(kind="deepspeed", path="/home/me/t.py", config="/conf/ds.json"),
        ),
    ],
)
def test_each_form_of_a_program_is_read(spelled: str, program: Program) -> None:
    assert parse(f"name: run\nprogram: {spelled}\n").program == program


@pytest.mark.parametrize(
    ("spelled", "message"),
    [
        ("train.py", "must be {script: train.py} for a program of your own"),
        ("python train.py --lr 1", 'must be {command: "python train.py --lr 1"} for a command'),
        (
            "{script: a, megatron: b}",
            "must have one of script, module, command, megatron and deepspeed",
        ),
        ("{scrpt: a}", 'unknown key; did you mean "script"?'),
        ("function", "a function is submitted from Python: docs/python.md"),
        (
            "{script: a, config: b}",
            "unknown key; valid keys: script, launch, arguments, args, python",
        ),
        ("{script: a, args: {x: 1}}", "must be a list of text"),
        ("", "must be pretrain_gpt or pretrain_bert, or a mapping"),
        ("[a]", "must be pretrain_gpt or pretrain_bert, or a mapping"),
    ],
)
def test_another_form_of_a_program_says_what_is_possible(spelled: str, message: str) -> None:
    assert any(message in line for line in find_problems(f"name: run\nprogram: {spelled}\n"))


def test_a_model_is_a_name_or_numbers() -> None:
    conf = parse_more("model: {layers: 2, hidden: 8, heads: 2, dropout: 0}\n")
    assert conf.model == Model(layers=2, hidden=8, heads=2, dropout=0.0)
    assert find_more("model: gpt2-xxl\n") == [
        'conf.yaml:3: model = gpt2-xxl: unknown model; did you mean "gpt2-xl"? '
        "A shape of your own is a mapping with layers, hidden and heads"
    ]
    assert find_more("model: {layers: 2, heads: 1}\n") == [
        "conf.yaml:3: model.hidden: is required: a whole number"
    ]


@pytest.mark.parametrize(
    "text", ["12:30", "on", "no", "010", "1.50", "0x10", "1e-5", "1_000", "2024-01-01", "=", "yes"]
)
def test_a_value_of_the_environment_is_the_text_that_was_written(text: str) -> None:
    assert parse_more(f"env: {{A: {text}}}\n").env == {"A": text}
    assert parse_more("", f"env.A={text}").env == {"A": text}


@pytest.mark.parametrize("text", ["1e-5", "1E-5", ".00001", "0.00001", "+1.0e-05"])
def test_a_number_may_be_written_as_people_write_numbers(text: str) -> None:
    assert parse_more(f"train: {{optimizer: {{lr: {text}}}}}\n").train.optimizer.lr == 1e-5


@pytest.mark.parametrize(
    "text", [".inf", ".nan", "nan", "1e999", "1:30", "'1'", "0x10", "1.2.3", "-"]
)
def test_what_is_no_number_is_refused(text: str) -> None:
    [problem] = find_more(f"train: {{optimizer: {{lr: {text}}}}}\n")
    assert "must be a number" in problem


@pytest.mark.parametrize(
    "text", ["1.0", "1e3", "010", "0x1", "1:30", "true", "'5'", "9" * 30, "null"]
)
def test_what_is_no_whole_number_is_refused(text: str) -> None:
    [problem] = find_more(f"train: {{steps: {text}}}\n")
    assert "must be a whole number" in problem


@pytest.mark.parametrize(("text", "value"), [("yes", True), ("Off", False), ("TRUE", True)])
def test_a_truth_may_be_any_word_of_yaml(text: str, value: bool) -> None:
    assert parse_more(f"profile: {{nsys: {text}}}\n").profile.nsys is value


def test_quotes_make_text_and_the_message_says_so() -> None:
    assert find_more("train: {steps: '5'}\n") == [
        "conf.yaml:3: train.steps = 5: must be a whole number, without quotes"
    ]
    assert parse_more('workdir: "null"\n').workdir == "/conf/null"


def test_unions_take_the_type_that_fits() -> None:
    assert parse_more("cluster: {nodes: [{group: a, gpus: 4}]}\n").cluster.nodes[0].gpus == 4
    assert parse_more("profile: {ranks: [0, 3]}\n").profile.ranks == (0, 3)
    assert parse_more("profile: {ranks: all}\n").profile.ranks == "all"
    assert parse_more("container: {reuse: no}\n").container.reuse is False
    assert parse_more("train: {loss_scale: 128}\n").train.loss_scale == 128.0
    assert find_more("parallel: {data: some}\n") == [
        "conf.yaml:3: parallel.data = some: must be a whole number or auto"
    ]


def test_values_of_sbatch_keep_truths_and_whole_numbers_and_else_the_text() -> None:
    options = "{exclusive: true, nice: 100, begin: 12:30, x: 1.50, constraint: ib, y: '7'}"
    expected = {
        "exclusive": True,
        "nice": 100,
        "begin": "12:30",
        "x": "1.50",
        "constraint": "ib",
        "y": "7",
    }
    assert parse_more(f"cluster: {{sbatch: {options}}}\n").cluster.sbatch == expected
    assert "must be a single value" in find_more("cluster: {sbatch: {a: [b]}}\n")[0]


def test_an_empty_section_is_as_good_as_none() -> None:
    text = "train:\ncontainer: null\nenv:\npass_env:\ncluster:\n  nodes:\nmodel: null\n"
    assert parse_more(text) == parse(MINIMAL)


def test_without_groups_one_node_gets_the_ranks_of_the_layout() -> None:
    [group] = parse_more("parallel: {pipeline: 2, data: 3, tensor: 2}\n").cluster.nodes
    assert (group.group, group.count, group.num_ranks) == ("master", 1, 12)


def test_anchors_and_merge_keys_work() -> None:
    conf = parse_more("""\
cluster:
  nodes:
    - &first {group: a, count: 2, queue: q, env: &env {A: 1, B: 2}}
    - {<<: *first, group: b, env: {<<: *env, B: 3}}
""")
    first, second = conf.cluster.nodes
    assert (second.group, second.count, second.queue) == ("b", 2, "q")
    assert (first.env, second.env) == ({"A": "1", "B": "2"}, {"A": "1", "B": "3"})


@pytest.mark.parametrize(
    ("runtime", "image", "expected"),
    [
        ("auto", "a/b.sqsh", "/conf/a/b.sqsh"),
        ("auto", "image", "/conf/image"),
        ("auto", "./x#y", "/conf/x#y"),
        ("auto", "docker://ubuntu:24.04", "docker://ubuntu:24.04"),
        ("pyxis", "nvcr.io#nvidia/pytorch:23.04-py3", "nvcr.io#nvidia/pytorch:23.04-py3"),
        ("podman", "ubuntu:24.04", "ubuntu:24.04"),
        ("apptainer", "~/x.sif", "/home/me/x.sif"),
    ],
)
def test_an_image_is_a_path_or_a_reference(runtime: str, image: str, expected: str) -> None:
    conf = parse_more(f"container: {{runtime: {runtime}, image: '{image}'}}\n")
    assert conf.container.image == expected


def test_a_file_that_cannot_be_read_is_a_problem_of_the_conf(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_bytes(b"name: a\nprogram: \xff\n")
    with pytest.raises(ConfError, match=r"broken.yaml:2: is not UTF-8 text \(byte 0xff\)"):
        read_conf(broken)
    with pytest.raises(ConfError, match=r"none.yaml: cannot be read: No such file"):
        read_conf(tmp_path / "none.yaml")


def test_read_conf_also_checks_keys_against_each_other(tmp_path: Path) -> None:
    path = tmp_path / "conf.yaml"
    path.write_text(MINIMAL + "parallel: {pipeline: 2, partition: 1-2-3}\n", encoding="utf-8")
    with pytest.raises(ConfError) as caught:
        read_conf(path, environ={})
    assert [problem.key for problem in caught.value.problems] == [
        "program.script",
        "parallel.partition",
    ]
    assert [problem.where for problem in caught.value.problems] == [f"{path}:2", f"{path}:3"]


def test_a_variable_that_the_submitting_shell_lacks_is_a_problem_of_its_line() -> None:
    text = MINIMAL + "pass_env:\n  - HF_HOME\n  - HF_TOKEN\n  - 'a b'\n"
    conf, lines = parse_conf_lines(text, "c", BASE, environ={})

    def find(environ: dict[str, str] | None) -> list[str]:
        problems = check_conf(conf, lines, base=BASE, require_paths=False, environ=environ)
        return [str(problem) for problem in problems if "a name has" not in problem.message]

    assert find({"HF_HOME": "/hf"}) == [
        "c:5: pass_env[1] = HF_TOKEN: is not set in this shell; set it, or remove it here"
    ]
    assert find({"HF_HOME": "", "HF_TOKEN": "x"}) == [] and find(None) == []


def test_a_missing_variable_is_a_problem_among_the_others_and_a_warning_of_a_dry_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "conf.yaml"
    path.write_text(MINIMAL + "pass_env: [HF_TOKEN]\n", encoding="utf-8")
    with pytest.raises(ConfError) as caught:
        read_conf(path, environ={})
    keys = [problem.key for problem in caught.value.problems]
    assert keys == ["program.script", "pass_env[0]"]
    (tmp_path / "train.py").touch()
    assert read_conf(path, environ={"HF_TOKEN": "x"}).pass_env == ("HF_TOKEN",)
    assert caplog.messages == []
    read_conf(path, environ={}, require_env=False)
    [warning] = caplog.messages
    assert warning.startswith(f"{path}:3: pass_env[0] = HF_TOKEN: is not set in this shell")
    assert warning.endswith("a submit from this shell would be refused")


def test_every_field_has_a_type_that_the_reader_knows() -> None:
    known = {str, int, float, bool, Partition, typing.Any}
    for section in list_sections():
        for name, hint in get_hints(section.cls).items():
            members = typing.get_args(hint)
            if typing.get_origin(hint) not in (typing.Union, types.UnionType):
                members = (hint,)
            for member in members:
                origin = typing.get_origin(member)
                is_generic = origin in (typing.Literal, tuple) or (
                    isinstance(origin, type) and issubclass(origin, typing.Mapping)
                )
                is_known = member in known or member is types.NoneType or is_scalar(member)
                assert is_known or is_generic or dataclasses.is_dataclass(member), name


def test_what_is_no_file_is_not_read_as_a_conf(tmp_path: Path) -> None:
    """A pipe without a writer blocked, and /dev/zero took all memory."""
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "large").open("wb") as handle:
        handle.truncate(3 << 30)
    for path, said in (
        (tmp_path / "pipe", "is a pipe that nobody writes to"),
        (Path("/dev/zero"), "is a device, not a file"),
        (tmp_path / "large", "is larger than 8 MB"),
    ):
        with pytest.raises(ConfError, match=said):
            read_text(path, str(path))


def test_a_file_that_never_ends_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/proc/kmsg is a regular file, and a read of it waits for the kernel's next message."""
    waits: list[bool] = []
    monkeypatch.setattr(os, "set_blocking", lambda fd, is_blocking: waits.append(is_blocking))
    (tmp_path / "c.yaml").write_text("name: t")
    assert read_text(tmp_path / "c.yaml", "c.yaml") == "name: t" and waits == [False]


@pytest.mark.parametrize(
    ("name", "remedy"), [("train.py", "vjob run train.py"), ("job.sh", "--from job.sh > conf")]
)
def test_a_script_in_place_of_a_conf_is_told_apart(name: str, remedy: str) -> None:
    with pytest.raises(ConfError) as error:
        read_text(Path(name), name)
    assert remedy in str(error.value)


def test_a_conf_may_come_through_a_pipe() -> None:
    ours, theirs = os.pipe()
    os.write(theirs, b"name: a\n")
    os.close(theirs)
    assert read_text(Path(f"/dev/fd/{ours}"), "pipe") == "name: a\n"
    os.close(ours)


@pytest.mark.parametrize(
    ("cluster", "overrides", "groups"),
    [
        ("", (), [("master", 1, 1)]),
        ("parallel: {data: 3}", (), [("master", 1, 3)]),
        ("", ("cluster.nodes=2",), [("master", 2, 1)]),
        ("", ("cluster.nodes[0].ranks=2",), [("master", 1, 2)]),
        ("cluster: {nodes: 2}", (), [("master", 2, 1)]),
        ("cluster: {nodes: {ranks: 2}}", (), [("master", 1, 2)]),
        ("cluster: {nodes: [{ranks: 2}]}", (), [("master", 1, 2)]),
        ("cluster: {nodes: [{count: 2}, {ranks: 3}]}", (), [("master", 2, 1), ("group1", 1, 3)]),
        ("cluster: {nodes: [{group: a}, {ranks: 3}]}", (), [("a", 1, 1), ("group1", 1, 3)]),
    ],
)
def test_nodes_may_be_a_number_a_group_or_left_out(
    cluster: str, overrides: tuple[str, ...], groups: list[tuple[str, int, int]]
) -> None:
    conf = parse_conf(f"name: a\nprogram: {{script: t.py}}\n{cluster}\n", "c", BASE, overrides)
    found = [(one.group, one.count, one.num_ranks) for one in conf.cluster.nodes]
    assert found == groups


@pytest.mark.parametrize(
    ("text", "override"), [("{layout: world}", ()), ("{}", ("morph.layout=world",))]
)
def test_a_renamed_key_is_read_by_its_old_name_and_told_once(
    text: str, override: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "conf.yaml"
    path.write_text(f"name: a\nprogram: {{script: a.py}}\nmorph: {text}\n")
    assert load_conf(path, override).conf.morph.mode == "world"
    assert [record.getMessage() for record in caplog.records] == [
        f"{'--set' if override else f'{path}:3'}: morph.layout was renamed: write morph.mode"
    ]

"""Slurm's words in a conf: each is answered with the key to write and its value, or with none."""

from __future__ import annotations

import pytest

from tests.jobs.conf.test_load import find_more
from vjob.jobs.conf.parse import list_conf_keys
from vjob.jobs.conf.references import suggest_reference
from vjob.jobs.conf.slurm_words import PASSED_ON, WORDS, answer_word

GROUP = "cluster.nodes[0]"
SUCH_AS = " in a group of cluster.nodes, such as `nodes: [{queue: gpu1}]`"
IN_GROUP = " in a group of cluster.nodes"


@pytest.mark.parametrize(
    ("word", "value", "answer", "place"),
    [
        ("partition", "gpu1", "write `queue: gpu1`", IN_GROUP),
        ("--partition", "a,b", 'write `queue: "a,b"`', IN_GROUP),
        ("gres", "gpu:a100:4", 'write `gpus: "a100:4"`', IN_GROUP),
        ("gres", "gpu:4", "write `gpus: 4`", IN_GROUP),
        ("gres", "gpu", "write `gpus: 1`", IN_GROUP),
        ("gres", "shard:2", "use `gpus`", IN_GROUP),
        ("gpus_per_node", "a100:4", 'write `gpus: "a100:4"`', IN_GROUP),
        ("nodes", "2", "write `nodes: 2`", " in cluster"),
        ("nodes", "2-4", "use `nodes`", " in cluster"),
        ("ntasks_per_node", "4", "write `ranks: 4`", IN_GROUP),
        ("mem", "64G", "write `memory_gb: 64`", IN_GROUP),
        ("mem", "64000", "write `memory_gb: 63`", IN_GROUP),
        ("mem", "0", "write `memory_gb: 0`", IN_GROUP),
        ("time", "2:00:00", "write `walltime_min: 120`", " in cluster"),
        ("time", "1-12", "write `walltime_min: 2160`", " in cluster"),
        ("time", "UNLIMITED", "use `walltime_min`", " in cluster"),
        ("account", "ml", "write `account: ml`", " in cluster"),
        ("qos", "high", "write `qos: high`", " in cluster"),
        ("exclude", "n1,n[2-3]", 'write `exclude: [n1, "n[2-3]"]`', " in cluster"),
        ("no_requeue", "true", "write `requeue: false`", " in cluster"),
        ("signal", "B:USR1@60", "write `signal_before_end_s: 60`", " in cluster"),
        ("job_name", "gpt", "write `name: gpt`", " at the top of the conf"),
        ("chdir", "/work/a", "write `workdir: /work/a`", " at the top of the conf"),
        ("container_image", "a.sqsh", "write `image: a.sqsh`", " in container"),
        ("array", "0-3", "submits several", None),
    ],
)
def test_a_word_is_answered_with_the_key_and_its_value(
    word: str, value: str, answer: str, place: str | None
) -> None:
    for parent in ("", "cluster", GROUP, "cluster.sbatch", f"{GROUP}.sbatch"):
        said = answer_word(parent, word, value)
        own = {IN_GROUP: GROUP, " in cluster": "cluster", " at the top of the conf": ""}
        if place is None:
            assert answer in said
        elif parent != GROUP or word != "nodes":
            is_there = parent == own.get(place, "-")
            assert said.partition(", such as")[0] == answer + ("" if is_there else place), parent


def test_an_answer_can_be_pasted_as_it_is() -> None:
    said = answer_word("cluster", "partition", "gpu1")
    assert said == f"write `queue: gpu1`{IN_GROUP}, such as `nodes: [{{queue: gpu1}}]`"
    assert answer_word(GROUP, "nodes", "2") == "write `count: 2`"
    said = answer_word("cluster", "partition", "gpu1", is_set=True)
    assert said == "write `--set 'cluster.nodes[0].queue=gpu1'`"
    said = answer_word("", "constraint", "ib", is_set=True)
    assert said == "write `--set cluster.sbatch.constraint=ib`"


def test_what_does_not_count_the_same_gets_no_value() -> None:
    assert answer_word("", "ntasks", "8") == f"use `ranks`{IN_GROUP}, of one node"
    assert answer_word(GROUP, "mem_per_cpu", "4G") == "use `memory_gb`, of a whole node"
    said = answer_word(GROUP, "cpus_per_task", "8")
    assert said == "use `cpus`, for all ranks of one node together"
    assert answer_word("cluster", "time", "12:30") == (
        "write `walltime_min: 13` (Slurm reads 12:30 as minutes and seconds)"
    )


@pytest.mark.parametrize("word", ["constraint", "mail_user", "nodelist", "reservation", "licenses"])
def test_an_option_without_a_key_goes_through_sbatch(word: str) -> None:
    option = word.replace("_", "-")
    said = f"it is an option of sbatch: write `sbatch: {{{option}: x}}`"
    assert answer_word(GROUP, word, "x") == answer_word("cluster", word, "x") == said
    assert answer_word("", word, "x") == f"{said} in cluster"


def test_the_table_names_keys_that_are_there() -> None:
    assert {word.key for word in WORDS.values()} - {""} <= set(list_conf_keys())
    assert not PASSED_ON & set(WORDS)
    assert not any(answer_word("train", word, "1") for word in WORDS)


def test_a_conf_meets_the_answers() -> None:
    found = find_more("""\
partition: gpu1
nodes: [{group: a}]
cluster:
  partition: gpu1
  constraint: ib
  nodes:
    - {group: a, gpus: gpu:a100:4, mem: 64G, account: ml, exclusive: true}
train: {time: 3, order: data, lr: 1}
version: 3
""")
    assert [line.partition("valid keys: ")[0] for line in found] == [
        f"conf.yaml:3: partition = gpu1: unknown key; write `queue: gpu1`{SUCH_AS}",
        'conf.yaml:4: nodes = a list: unknown key; did you mean "cluster.nodes"?',
        f"conf.yaml:6: cluster.partition = gpu1: unknown key; write `queue: gpu1`{SUCH_AS}",
        "conf.yaml:7: cluster.constraint = ib: unknown key; it is an option of sbatch: write "
        "`sbatch: {constraint: ib}`",
        "conf.yaml:9: cluster.nodes[0].mem = 64G: unknown key; write `memory_gb: 64`",
        "conf.yaml:9: cluster.nodes[0].account = ml: unknown key; write `account: ml` in cluster",
        "conf.yaml:9: cluster.nodes[0].exclusive = true: unknown key; it is an option of sbatch: "
        "write `sbatch: {exclusive: true}`",
        "conf.yaml:10: train.time = 3: unknown key; ",
        'conf.yaml:10: train.order = data: unknown key; elsewhere there is "parallel.order"',
        'conf.yaml:10: train.lr = 1: unknown key; did you mean "train.optimizer.lr"?',
        "conf.yaml:11: version = 3: unknown key; ",
    ]


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("cluster.partition", "did you mean ${cluster.nodes[0].queue}?"),
        ("partition", "did you mean ${parallel.partition} or ${cluster.nodes[0].queue}?"),
        ("cluster.time", "did you mean ${cluster.walltime_min}?"),
        ("trian.lr", "did you mean ${train.optimizer.lr}?"),
        ("train.step", 'did you mean "train.steps"?'),
        ("train.order", "docs/conf.md lists them"),
    ],
)
def test_a_reference_by_a_word_names_no_other_section(key: str, meant: str) -> None:
    assert suggest_reference(key).startswith(meant)

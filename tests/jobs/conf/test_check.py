"""One key of a conf against another, and the files that must be there."""

from __future__ import annotations

import typing
from pathlib import Path

import pytest

from vjob.jobs.conf.document import list_sections
from vjob.jobs.conf.loading.check import check_conf
from vjob.jobs.conf.loading.check_bounds import locate_line
from vjob.jobs.conf.loading.load import parse_conf_lines
from vjob.jobs.conf.parse import (
    describe,
    find_bounds,
    get_annotations,
    get_hints,
    get_members,
)
from vjob.jobs.conf.schema import JobConf, NodeGroup, Optimizer, Program, Train
from vjob.jobs.conf.slurm_words import WORDS
from vjob.jobs.errors import ConfError

BASE = Path("/conf")
HEAD = "name: run\nprogram: {script: /none/train.py}\n"
MODEL = "model: {layers: 8, hidden: 64, heads: 8}\n"


def find_problems(text: str, *, head: str = HEAD) -> list[str]:
    conf, lines = parse_conf_lines(head + text, "c", BASE, environ={})
    problems = check_conf(conf, lines, base=BASE, require_paths=False)
    # Keys that a script does not hear of are test_fates.py's.
    return [str(one) for one in problems if "has no effect with" not in one.message]


def find_in_groups(*groups: str, text: str = "") -> list[str]:
    nodes = "".join(f"    - {{{group}}}\n" for group in groups)
    return find_problems(text + "cluster:\n  nodes:\n" + nodes)


def test_a_conf_that_fits_together_has_no_problems() -> None:
    groups = ["group: master, gpus: a100:4", "group: slave, count: 7, gpus: a10:4, cpus: 14"]
    layout = (
        "model: gpt2-xl\ntrain: {global_batch_size: 64}\n"
        "parallel: {pipeline: 8, data: 4, partition: 0-11-8-8-8-8-5-0}\n"
    )
    assert find_in_groups(*groups, text=layout) == []
    assert find_in_groups(*groups, text=layout.replace("data: 4", "data: auto")) == []


@pytest.mark.parametrize("name", ["..", ".x", "a/b", "-a", "a b", "é", "a\nb", "x" * 65, "''"])
def test_a_name_must_be_safe_as_a_folder(name: str) -> None:
    text = "a\\nb" if name == "a\nb" else name.strip("'")
    head = f'name: "{text}"\nprogram: {{script: t}}\n'
    [problem] = find_problems("", head=head)
    assert problem.startswith("c:1: name = ") and "names a folder" in problem


@pytest.mark.parametrize("name", ["a", "gpt2-xl", "A_1.b", "9b", "x" * 64])
def test_a_plain_name_is_fine(name: str) -> None:
    assert find_problems("", head=f"name: {name}\nprogram: {{script: t}}\n") == []


@pytest.mark.parametrize("name", ["last", "12", "L3"])
def test_a_name_that_reads_as_a_job_is_refused(name: str) -> None:
    (problem,) = find_problems("", head=f"name: {name}\nprogram: {{script: t}}\n")
    assert "would be read as a job" in problem


def test_group_names_are_safe_and_differ() -> None:
    assert find_in_groups("group: a.b", "group: x", "group: x") == [
        "c:5: cluster.nodes[0].group = a.b: must be at most 64 letters, digits, - and _, a "
        "letter or digit first",
        "c:7: cluster.nodes[2].group = x: must be unique; cluster.nodes[1] has this name too",
    ]


@pytest.mark.parametrize("gpus", ["a100", "a100:", ":4", "a100:0", "a 100:4", "4:a100", "-1", "''"])
def test_gpus_are_a_type_and_a_number(gpus: str) -> None:
    [problem] = find_in_groups(f"group: a, gpus: '{gpus.strip(chr(39))}'")
    assert "must be a type and a number such as a100:4" in problem


@pytest.mark.parametrize(
    ("group", "key", "message"),
    [
        ("count: 0", "count", "must be at least 1"),
        ("ranks: 0", "ranks", "must be at least 1"),
        ("cpus: 0", "cpus", "must be at least 1"),
        ("memory_gb: -1", "memory_gb", "must be at least 0"),
        ("gpus: -1", "gpus", "must be at least 0"),
        ("gpus: 'gpu:a100:4'", "gpus", 'write `gpus: "a100:4"`'),
        ("gpus: 'gpu:4'", "gpus", "write `gpus: 4`"),
        ("gpus: a100", "gpus", 'write `gpus: "a100:1"`'),
        ("devices: []", "devices", "must list at least one GPU"),
        ("devices: [1, 1]", "devices", "must not list a GPU twice"),
        ("devices: [-1]", "devices[0]", "is not there"),
        ("gpus: 4, devices: [3, 4]", "devices[1]", "must be 0 to 3, as gpus is 4"),
        ("devices: [4, 5], ranks: 4", "ranks", "must be 2, one for each of devices"),
        ("interface: 'a b'", "interface", "must be auto or an interface"),
        ("queue: 'a b'", "queue", "without spaces"),
        ("sbatch: {time: 3}", "sbatch.time", "write `walltime_min: 3` in cluster"),
        ("env: {1x: 3}", "env.1x", "a name has letters"),
    ],
)
def test_a_group_is_checked_by_itself(group: str, key: str, message: str) -> None:
    [problem] = find_in_groups(f"group: a, {group}")
    assert problem.startswith(f"c:5: cluster.nodes[0].{key} = ") and message in problem


def test_a_world_that_does_not_come_out_names_what_is_left() -> None:
    groups = ("group: a, ranks: 4", "group: b, count: 6, ranks: 4")
    assert find_in_groups(*groups, text="parallel:\n  pipeline: 8\n") == [
        "c:4: parallel.pipeline = 8: a replica takes 8 ranks (pipeline 8 x tensor 1), so 28 ranks "
        "(1x4 + 6x4) leave 4 unused; change the factors, or count or ranks of cluster.nodes"
    ]
    assert find_in_groups(*groups, text="parallel: {pipeline: 7, data: 2}\n") == [
        "c:3: parallel.data = 2: pipeline 7 x data 2 x tensor 1 = 14 ranks, but the nodes have 28 "
        "(1x4 + 6x4); parallel.data 4 or auto would fit"
    ]
    assert find_in_groups("group: a, ranks: 4", text="parallel: {pipeline: 8}\n") == [
        "c:3: parallel.pipeline = 8: pipeline 8 x tensor 1 = 8 ranks, but the nodes have only 4 "
        "(1x4)"
    ]


def test_a_run_that_may_morph_may_leave_ranks_over() -> None:
    text = "parallel: {pipeline: 8}\nmorph: {enabled: true}\n"
    assert find_in_groups("group: a, count: 7, ranks: 4", text=text) == []


def test_programs_whose_layout_is_written_at_submit_do_not_morph() -> None:
    for kind in ("megatron", "deepspeed"):
        head = f"name: run\nprogram: {{{kind}: train.py}}\n"
        problems = find_problems("morph: {enabled: true}\n", head=head)
        assert (
            "c:3: morph.enabled = True: is for pretrain_gpt, pretrain_bert, script, module, "
            f"command, not for {kind}"
        ) in problems


def test_a_script_of_unknown_layers_cannot_be_shallower_than_asked() -> None:
    text = "parallel: {pipeline: 8}\nmorph: {enabled: true}\n"
    (problem,) = find_in_groups("group: a, count: 4", text=text)
    assert problem == (
        "c:3: parallel.pipeline = 8: 8 stages need more than 4 ranks (4x1), and vjob can use "
        "fewer stages only if it knows the number of layers: set parallel.partition"
    )
    cut = text.replace("pipeline: 8", "pipeline: 8, partition: 1-1-1-1-1-1-1-1")
    assert find_in_groups("group: a, count: 4", text=cut) == []


def test_where_only_the_number_of_ranks_morphs_there_are_no_stages() -> None:
    on = "morph: {enabled: true, mode: world}\n"
    assert find_problems(on) == []
    (problem,) = find_problems(on + "parallel: {pipeline: 2}\n")
    assert "parallel.pipeline = 2: conflicts with morph.mode: world" in problem
    problems = find_problems(on + "parallel: {partition: '4'}\n")
    assert any("parallel.partition = 4: conflicts with morph.mode" in said for said in problems)
    head = "name: run\nprogram: pretrain_gpt\nmodel: gpt2-small\ndata: {synthetic: true}\n"
    saves = head + "train: {checkpoint: {folder: ckpt}}\n"
    (problem,) = find_problems(on, head=saves)
    assert "morph.mode = world: is for script, module, command; leave" in problem


def test_a_run_that_may_morph_needs_checkpoints_and_may_have_several_kinds_of_node() -> None:
    head = "name: run\nprogram: pretrain_gpt\nmodel: gpt2-small\ndata: {synthetic: true}\n"
    on = "morph: {enabled: true}\n"
    (problem,) = find_problems(on, head=head)
    assert "morph.enabled = True: needs train.checkpoint.folder" in problem
    saves = head + "train: {checkpoint: {folder: ckpt}}\n"
    assert find_problems(on, head=saves) == []
    groups = "cluster: {nodes: [{group: a}, {group: b}]}\n"
    assert find_problems(groups + on, head=saves) == []
    split = "cluster: {hetero: split, requeue: true, nodes: [{group: a}, {group: b}]}\n"
    assert find_problems(split + on, head=saves) == []


def test_tensor_groups_lie_within_a_node_and_divide_the_heads() -> None:
    assert find_in_groups("group: a, count: 3, ranks: 4", text="parallel: {tensor: 3}\n") == [
        "c:3: parallel.tensor = 3: 3 does not divide the 4 ranks of a node in group a; a "
        "tensor group must lie within one node"
    ]
    assert find_in_groups("group: a, ranks: 3", text=MODEL + "parallel: {tensor: 3}\n") == [
        "c:4: parallel.tensor = 3: must divide the model's 8 heads"
    ]
    assert find_problems("model: {layers: 1, hidden: 10, heads: 3}\n") == [
        "c:3: model.hidden = 10: must be a multiple of heads, 3"
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("parallel: {tensor: 2, sequence_parallel: true}", None),
        ("parallel: {sequence_parallel: true}", "sequence_parallel = True: needs parallel.tensor"),
        ("parallel: {context: 2}", None),
        ("parallel: {context: 2, pipeline: 8}", "context = 2: must divide parallel.data, 1"),
        ("parallel: {context: 8}", "context = 8: must divide model.sequence, 1028"),
        ("parallel: {context: 2, tensor: 2}", "parallel.tensor = 2: conflicts with"),
        (
            "parallel: {context: 2}\nmorph: {enabled: true}\ntrain: {checkpoint: {folder: c}}",
            "parallel.context = 2: conflicts with morph.enabled",
        ),
        (
            "parallel: {context: 2, pipeline: auto}\ntrain: {global_batch_size: 64}",
            "parallel.context = 2: conflicts with auto",
        ),
        ("parallel: {context: 2}\ntrain: {compile: true}", "train.compile = True: conflicts"),
        (
            "parallel: {tensor: 8, sequence_parallel: true}",
            "parallel.tensor 8 must divide model.sequence, 1028",
        ),
        (
            "parallel: {tensor: 2, schedule: 1f1b}\ntrain: {compile: true}",
            "train.compile = True: conflicts with parallel.tensor above 1",
        ),
        ("parallel: {schedule: 1f1b}\ntrain: {compile: true, optimizer: {name: lamb}}", None),
        ("train: {precision: fp8}", None),
        (
            "parallel: {tensor: 2}\ntrain: {precision: fp8}",
            "train.precision = fp8: conflicts with parallel.tensor above 1",
        ),
        (
            "parallel: {tensor: 2}\ntrain: {optimizer: {name: lamb}}",
            "train.optimizer.name = lamb: needs whole weights",
        ),
        (
            "parallel: {zero: 2, schedule: 1f1b}\ntrain: {cuda_graphs: true}",
            "parallel.zero = 2: conflicts with train.cuda_graphs; use 0 or 1",
        ),
        (
            "parallel: {zero: 3, schedule: 1f1b, recompute: offload}",
            "parallel.zero = 3: conflicts with parallel.recompute: offload; use 1 or 2",
        ),
        (
            "parallel: {schedule: 1f1b, recompute: selective}\ntrain: {compile: true}",
            "parallel.recompute = selective: conflicts with train.compile",
        ),
        (
            "parallel: {schedule: varuna, recompute: offload}",
            "parallel.recompute = offload: conflicts with parallel.schedule: varuna, which recom",
        ),
        (
            "parallel: {tensor: 2, schedule: 1f1b}\ntrain: {cuda_graphs: true}",
            "train.cuda_graphs = True: conflicts with parallel.tensor above 1",
        ),
        (
            "parallel: {zero: 3, schedule: 1f1b}\ntrain: {compile: true}",
            "parallel.zero = 3: conflicts with train.compile; use 1 or 2",
        ),
        (
            "parallel: {zero: 3}\ntrain: {optimizer: {name: lamb}}",
            "parallel.zero = 3: splits tensors",
        ),
        ("parallel: {schedule: zbv}\ntrain: {compile: true}", None),
    ],
)
def test_shared_layers_are_refused_what_they_lack(text: str, problem: str | None) -> None:
    head = (
        "name: run\nprogram: pretrain_gpt\ndata: {synthetic: true}\n"
        "model: {layers: 8, hidden: 64, heads: 8, sequence: 1028}\n"
        "cluster: {nodes: [{group: a, ranks: 8}]}\n"
    )
    problems = find_problems(text + "\n", head=head)
    assert len(problems) == (problem is not None), problems
    assert problem is None or problem in problems[0]


def test_the_global_batch_is_a_multiple_of_what_the_replicas_take() -> None:
    text = "train: {micro_batch_size: 4, global_batch_size: 20}\n"
    assert find_in_groups("group: a, ranks: 2", text=text) == [
        "c:3: train.global_batch_size = 20: must be a multiple of data 2 x micro_batch_size 4 = 8"
    ]


@pytest.mark.parametrize(
    ("partition", "schedule", "message"),
    [
        ("4-4", "auto", ""),
        ("0-8", "1f1b", ""),
        ("5-5", "1f1b", ""),
        ("1-9", "1f1b", ""),
        ("2-2-2-2", "zbv", ""),
        ("2-2-2-2-0-0", "interleaved", ""),
        ("0-10", "1f1b", "the first and the last number must be at least 1"),
        ("4-5", "1f1b", "sums to 9, but the model has 8 layers (10 with both ends)"),
        ("8", "1f1b", "has 1 numbers, but parallel.pipeline is 2"),
        ("4-4", "interleaved", "equally many chunks on each of 2 stages: 4, 6, ..."),
        ("3-3-2", "interleaved", "equally many chunks"),
        ("4-4", "zbv", "zbv needs 4: two chunks"),
    ],
)
def test_a_partition_fits_the_stages_and_the_model(
    partition: str, schedule: str, message: str
) -> None:
    layout = f'parallel: {{pipeline: 2, partition: "{partition}", schedule: {schedule}}}\n'
    problems = find_problems(MODEL + layout)
    assert bool(problems) == bool(message)
    assert all(problem.startswith("c:4: parallel.partition") for problem in problems)
    assert not message or message in problems[0]


@pytest.mark.parametrize("text", ["4,4", "4--4", "4-x", ""])
def test_a_text_that_is_no_partition_is_refused_where_it_stands(text: str) -> None:
    said = "c:4: parallel.partition = .*must be auto or layers per stage such as 0-11-8-8"
    with pytest.raises(ConfError, match=said):
        find_problems(MODEL + f'parallel: {{pipeline: 2, partition: "{text}"}}\n')


@pytest.mark.parametrize(
    ("port", "message"),
    [
        (6787, ""),
        (1024, ""),
        (29500, ""),
        (61000, ""),
        (65535, ""),
        (80, "must be 1024 to 65535, or auto"),
        (65536, "must be 1024 to 65535, or auto"),
        (32768, "Linux gives to outgoing connections"),
        (60999, "Linux gives to outgoing connections"),
    ],
)
def test_a_port_lies_outside_the_ephemeral_range(port: int, message: str) -> None:
    problems = find_problems(f"cluster: {{port: {port}}}\n")
    assert bool(problems) == bool(message) and message in "".join(problems)


def test_options_that_we_set_ourselves_name_the_key_to_use() -> None:
    required = """job-name output error nodes ntasks ntasks-per-node partition gres cpus-per-task
        mem time comment requeue no-requeue signal export exclude account qos array wrap chdir
        open-mode parsable hetjob"""
    assert set(required.split()) <= set(WORDS)
    options = "{partition: a, --nice: 3, reservation: 'a\\nb', exclusive: , x: [], constraint: ib}"
    text = "cluster:\n  sbatch: " + options.replace("[]", "true").replace("'", '"') + "\n"
    assert find_problems(text) == [
        "c:4: cluster.sbatch.partition = a: cannot be given here: write `queue: a` in a "
        "group of cluster.nodes, such as `nodes: [{queue: a}]`",
        "c:4: cluster.sbatch.--nice = 3: must be an option's long name, without leading dashes, "
        'such as "nice"',
        "c:4: cluster.sbatch.reservation = 'a\\nb': must be a single value on one line",
        "c:4: cluster.sbatch.exclusive = null: must have a value; true for an option that takes "
        "no value",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("cluster: {hetero: split}", "cluster.hetero = split: needs several groups"),
        ("cluster: {account: 'a b'}", "cluster.account = a b: must be a name without spaces"),
        ("cluster: {exclude: ['a b']}", "cluster.exclude[0] = a b: must be a node name"),
        ("cluster: {walltime_min: 0}", "cluster.walltime_min = 0: must be at least 1"),
        ("container: {runtime: enroot}", "container.runtime = enroot: needs container.image"),
        ("container: {mounts: ['a:/b']}", "container.mounts = [/conf/a:/b]: needs container.image"),
        ("container: {image: x, mounts: [a]}", "container.mounts[0] = a: must be source:target"),
        ("container: {image: x, mounts: ['a:b']}", "mounts[0] = /conf/a:b: the target b must be"),
        ("container: {image: x, mounts: ['a:/b:rw']}", "must be source:target"),
        (
            "cluster: {address: a}\nmorph: {enabled: true, mode: world}",
            "cluster.address = a: conflicts with morph, where any node may come first",
        ),
        ("cluster: {scheduler: machines}", "machines: needs cluster.machine_list, a file with"),
        ("cluster: {ssh_config: a}", "cluster.ssh_config = /conf/a: needs cluster.machine_list"),
        (
            "cluster: {machine_list: a, hetero: split, nodes: [{group: a}, {group: b}]}",
            "cluster.hetero = split: is for Slurm: one job starts all machines of cluster",
        ),
        (
            "cluster: {machine_list: a, nodes: [{group: a}, {group: b}]}\n"
            "morph: {enabled: true, mode: world}",
            "cluster.machine_list = /conf/a: needs one group in cluster.nodes with morph, not 2",
        ),
        (
            "container: {workdir: x}",
            "container.workdir = x: must be an absolute path of a folder in",
        ),
        (
            "train: {checkpoint: {folder: a, local: b}}",
            "train.checkpoint.local = b: must be an absolute path of a folder on",
        ),
        ("train: {checkpoint: {local: /b}}", "needs train.checkpoint.folder"),
        ("train: {optimizer: {betas: [0.9, 1]}}", "betas[1] = 1.0: must be at least 0 and less"),
        ("train: {clip_grad_norm: 0}", "train.clip_grad_norm = 0.0: must be more than 0"),
        ("train: {schedule: {min_lr: 1}}", "must be at most train.optimizer.lr, 0.00015"),
        (
            "model: {layers: 1, hidden: 1, heads: 1, dropout: 1}",
            "model.dropout = 1.0: must be less",
        ),
        ("data: {}", "data = a mapping: must have prefix, or synthetic: true"),
        ("data: {prefix: a, synthetic: true}", "conflicts with data.prefix"),
        ("data: {synthetic: true, split: '1,2'}", "data.split = 1,2: must be three shares"),
        ("data: {synthetic: true, split: '0,0,0'}", "data.split = 0,0,0: must be three shares"),
        ("data: {synthetic: true, split: '1..2,0,0'}", "must be three shares"),
        ("morph: {min_nodes: 3, max_nodes: 2}", "must be at most morph.max_nodes, 2"),
        ("morph: {grow: auto}", "morph.grow = auto: needs morph.enabled: true"),
        ("morph: {leave_slow: true}", "morph.leave_slow = True: needs morph.enabled: true"),
        ("morph: {look_s: 0}", "morph.look_s = 0: must be at least 1"),
        ("morph: {stop_s: 1}", "morph.stop_s = 1: must be at least 5"),
        ("morph: {return_s: 1}", "morph.return_s = 1: must be at least 5"),
        ("morph: {return_s: 99999}", "morph.return_s = 99999: must be at most 86400"),
        ("morph: {manager_failures: 0}", "morph.manager_failures = 0: must be at least 1"),
        ("profile: {ranks: [0, 1]}", "profile.ranks[1] = 1: must be a rank, 0 to 0"),
        ("prices: {a10: -1}", "prices.a10 = -1.0: must be at least 0"),
        ("notify: {mail: me}", "notify.mail = me: must be an email address"),
        ("notify: {webhook: hooks}", "notify.webhook = <redacted>: must be a URL"),
        ("env: {RANK: 1}", "env.RANK = 1: RANK is set by vjob: it follows from cluster.nodes"),
        ("env: {ROLE_RANK: 1}", "ROLE_RANK is set by vjob for each rank, as torchrun sets it"),
        ("env: {MASTER_PORT: 1}", "MASTER_PORT is set by vjob: it is cluster.port"),
        ("env: {VJOB_X: 1}", "names that begin with VJOB_ are reserved for vjob"),
        ("env: {a-b: 1}", "env.a-b = 1: a name has letters"),
        ("pass_env: [HOME, 'a b']", "pass_env[1] = a b: a name has letters"),
        ('log_folder: "a\\nb"', "a path must not contain line breaks"),
    ],
)
def test_each_section_is_checked(text: str, problem: str) -> None:
    problems = find_problems(text + "\n")
    assert len(problems) == 1 and problem in problems[0], problems
    assert problems[0].startswith("c:3: ")


def test_a_run_cannot_shrink_below_more_nodes_than_it_has() -> None:
    problems = find_problems("morph: {enabled: true, min_nodes: 3}\n")
    assert any("morph.min_nodes = 3: must be at most the 1 nodes of" in item for item in problems)


def test_a_run_that_grows_by_itself_says_how_far() -> None:
    problems = find_problems("morph: {enabled: true, grow: auto}\n")
    assert any("morph.grow = auto: needs morph.max_nodes" in item for item in problems)
    text = "morph: {enabled: true, leave_slow: true}\nprofile: {timeline: false}\n"
    assert any("leave_slow = True: needs profile.timeline" in item for item in find_problems(text))


def test_split_jobs_cannot_be_requeued_one_by_one() -> None:
    nodes = "nodes: [{group: a}, {group: b}]"
    assert find_problems(f"cluster: {{hetero: hetjob, requeue: true, {nodes}}}\n") == []
    [problem] = find_problems(f"cluster: {{hetero: split, requeue: true, {nodes}}}\n")
    assert problem.startswith("c:3: cluster.requeue = True: conflicts with cluster.hetero: split")


def test_the_same_error_is_started_anew_only_where_others_are() -> None:
    nodes = "nodes: [{group: a}, {group: b}]"
    for layout in ("hetjob", "split"):
        text = f"cluster: {{hetero: {layout}, restarts: 2, restart_same: true, {nodes}}}\n"
        assert find_problems(text) == []
    [problem] = find_problems("cluster: {restart_same: true, nodes: [{group: a}]}\n")
    assert problem.endswith("cluster.restart_same = True: needs cluster.restarts, such as 3")


def test_a_built_in_program_needs_a_model_and_data() -> None:
    head = "name: run\nprogram: pretrain_gpt\n"
    assert [problem.split(":")[2].strip() for problem in find_problems("", head=head)] == [
        "model = null",
        "data = null",
    ]


def test_a_list_without_groups_is_refused_where_it_was_made_by_hand() -> None:
    conf = JobConf(name="a", program=Program(kind="script", path="/t"))
    [problem] = check_conf(conf, {}, require_paths=False)
    assert problem.key == "cluster.nodes" and problem.where == "conf"


def test_files_that_the_job_would_miss_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.bin").touch()
    text = """\
name: run
program: {deepspeed: train.py, config: $HOME/ds.json, args: ["${data.prefix}"]}
data: {prefix: a}
container: {image: x.sqsh, mounts: ["b:/b", "/no/where:/c", ".:/d"]}
"""
    conf, lines = parse_conf_lines(text, "c", tmp_path, environ={})
    problems = [p for p in check_conf(conf, lines, base=tmp_path) if p.key != "program"]
    assert [(p.where, p.key, p.message.replace(str(tmp_path), "")) for p in problems] == [
        ("c:2", "program.deepspeed", "is not a file"),
        ("c:2", "program.config", "is not a file; variables are not expanded in paths"),
        ("c:3", "data.prefix", "/a.idx not found"),
        (
            "c:4",
            "container.image",
            "not found; write an image from a registry as docker://name:tag",
        ),
        ("c:4", "container.mounts[0]", "/b not found"),
    ]
    assert check_conf(conf, lines, base=tmp_path, require_paths=False) == []


def test_a_reference_without_its_scheme_is_spelled_out(tmp_path: Path) -> None:
    image = "nvcr.io/nvidia/pytorch:25.11-py3"
    text = f'name: run\nprogram: {{script: /opt/x.py}}\ncontainer: {{image: "{image}"}}\n'
    conf, lines = parse_conf_lines(text, "c", tmp_path, environ={})
    (problem,) = check_conf(conf, lines, base=tmp_path)
    assert problem.key == "container.image"
    assert problem.message.endswith("registry as docker://nvcr.io#nvidia/pytorch:25.11-py3")


def test_a_path_outside_the_confs_folder_may_be_inside_the_image(tmp_path: Path) -> None:
    text = "name: run\nprogram: {script: /opt/train.py}\n"
    conf, lines = parse_conf_lines(text, "c", tmp_path, environ={})
    assert [problem.key for problem in check_conf(conf, lines, base=tmp_path)] == ["program.script"]
    conf, lines = parse_conf_lines(text + "container: {image: 'docker://x'}\n", "c", tmp_path)
    assert check_conf(conf, lines, base=tmp_path) == []


def test_a_megatron_checkout_is_a_folder_or_a_script(tmp_path: Path) -> None:
    for name in ("m/pretrain_gpt.py", "other/pretrain_x.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    rest = "model: gpt2-small\ndata: {synthetic: true}\n"
    places = {"m": True, "other/pretrain_x.py": True, "other": False, "n": False, "n.py": False}
    for path, is_there in places.items():
        text = f"name: r\nprogram: {{megatron: {path}}}\n{rest}"
        conf, lines = parse_conf_lines(text, "c", tmp_path, environ={})
        problems = check_conf(conf, lines, base=tmp_path)
        assert [problem.key for problem in problems] == ["program.megatron"] * (not is_there)


def test_a_key_that_was_not_written_has_the_place_of_what_is_around_it() -> None:
    lines = {"": "c:1", "cluster.nodes": "c:5", "cluster.nodes[0]": "c:6"}
    assert locate_line(lines, "cluster.nodes[0].env.A") == "c:6"
    assert locate_line(lines, "cluster.nodes[1].env") == "c:5"
    assert locate_line(lines, "train.steps") == "c:1"


def test_every_number_of_a_conf_has_a_range() -> None:
    elsewhere = {"cluster.port", "cluster.nodes[].gpus"}
    for section in list_sections():
        for name, hint in get_annotations(section.cls).items():
            is_number = {int, float} & set(get_members(get_hints(section.cls)[name]))
            if is_number and f"{section.key}.{name}" not in elsewhere:
                relations = {bound.relation[0] for bound in find_bounds(hint)}
                assert relations == {"<", ">"}, f"{section.key}.{name}"
    assert typing.get_args(get_hints(NodeGroup)["devices"])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("model: {layers: 1, hidden: 1, heads: 1, dropout: -1}", "-1.0: must be at least 0"),
        ("train: {loss_scale: 0}", "train.loss_scale = 0.0: must be more than 0"),
        ("train: {seed: -1}", "train.seed = -1: must be at least 0"),
        ("train: {optimizer: {betas: [-1, 0]}}", "[0] = -1.0: must be at least 0 and less than 1"),
        ("cluster: {lost_s: 14}", "cluster.lost_s = 14: must be at least 15"),
    ],
)
def test_a_number_out_of_its_range_is_told_the_bound(text: str, problem: str) -> None:
    [found] = find_problems(text + "\n")
    assert found.endswith(problem)


def test_a_job_of_too_many_ranks_is_refused_before_it_is_built() -> None:
    """10^10 ranks ended in a MemoryError after 37 s."""
    problems = find_in_groups("group: a, count: 100000, ranks: 4096")
    assert any("cluster.nodes" in text and "409600000 ranks" in text for text in problems)


def test_a_price_below_zero_hides_no_problem_of_the_layout() -> None:
    problems = find_problems("prices: {a10: -1}\nparallel: {pipeline: 2, partition: 4-4-4}\n")
    assert "prices.a10 = -1.0: must be at least 0" in problems[0] and len(problems) > 1


def test_a_range_stands_in_the_documentation() -> None:
    described = {name: describe(hint) for name, hint in get_annotations(Train).items()}
    assert described["global_batch_size"] == "a whole number 1 to 10,000,000 or null"
    assert described["loss_scale"] == "a number > 0 and <= 1e15 or dynamic"
    betas = get_annotations(Optimizer)["betas"]
    assert describe(betas) == "a list of 2 numbers >= 0 and < 1"
    assert describe(get_hints(Optimizer)["betas"]) == "a list of 2 numbers"


@pytest.mark.parametrize("name", ["comm", "part", "out", "g"])
def test_a_beginning_of_an_option_of_ours_is_refused(name: str) -> None:
    """sbatch takes it for the whole: `comm` after our `--comment` hid the run from us."""
    (problem,) = find_problems(f"cluster:\n  sbatch: {{{name}: x}}\n")
    assert f"cluster.sbatch.{name} = x: sbatch may read it as {name}" in problem


@pytest.mark.parametrize("name", ["nice", "reservation", "exclusive", "time-min", "nodelist"])
def test_whole_options_of_sbatch_are_passed_on(name: str) -> None:
    found = find_problems(f"cluster:\n  sbatch: {{{name}: x}}\n")
    assert not [text for text in found if "may read it" in text]


def test_a_hundred_million_nodes_are_refused_at_once() -> None:
    problems = find_in_groups("group: a, count: 100000000", "group: b, count: 100001")
    assert [text.partition(": must be at most 100000")[0] for text in problems[:2]] == [
        "c:5: cluster.nodes[0].count = 100000000",
        "c:6: cluster.nodes[1].count = 100001",
    ]


def test_a_time_limit_of_more_than_ten_years_is_refused() -> None:
    (problem,) = find_problems("cluster: {walltime_min: 525600000000}\n")
    assert "cluster.walltime_min = 525600000000: must be at most 5256000" in problem


@pytest.mark.parametrize(
    ("track", "said"),
    [
        ("wandb: {project: a/b}", "track.wandb.project = a/b: must have at most 128"),
        ("wandb: {project: a, mode: later}", "must be one of online, offline"),
        ("wandb: {}", "track.wandb.project: is required: text"),
        ("mlflow: {experiment: e, uri: 'https://me:hunter2@h/x'}", "MLFLOW_TRACKING_PASSWORD"),
        ("mlflow: {experiment: e, uri: 'ftp://h'}", "must begin with http://, https://"),
        ("mlflow: {experiment: '', uri: 'http://h'}", "must name an experiment"),
        ("openmetrics: ''", "must name a file"),
        ("neptune: {project: a}", "unknown key; valid keys: wandb, mlflow"),
    ],
)
def test_what_no_tool_can_take_is_refused_with_what_to_do(track: str, said: str) -> None:
    try:
        found = find_problems(f"track: {{{track}}}\n")
    except ConfError as error:
        found = [str(error)]
    assert len(found) == 1 and said in found[0], found
    assert "hunter2" not in found[0]


def test_a_file_that_the_container_does_not_see_is_refused() -> None:
    text = "container: {image: docker://a, mounts: [%s]}\ntrack: {openmetrics: /node/gpt.prom}\n"
    (problem,) = find_problems(text % "")
    assert "add /node:/node to container.mounts" in problem
    assert find_problems(text % "/node:/node") == []

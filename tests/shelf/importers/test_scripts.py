"""Scripts of other launchers, in the form of their documents, become confs that dry-run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.command import Vjob
from tests.shelf.importers.shell_conf_tree import SCRIPTS
from vjob.jobs.conf.loading.load import parse_conf_lines
from vjob.jobs.conf.references import fill_references
from vjob.jobs.errors import InputError
from vjob.shelf.importers.translate import Source, translate_source

MEGATRON = """\
       --model-parallel-size 1 \\
       --num-layers 12 \\
       --hidden-size 512 \\
       --num-attention-heads 8 \\
       --batch-size $BATCH \\
       --seq-length 256 \\
       --max-position-embeddings 256 \\
       --train-iters 200 \\
       --lr-decay-iters 4000 \\
       --save $OUT \\
       --load $OUT \\
       --data-path $DATA_PATH \\
       --vocab-file words/vocab.json \\
       --data-impl mmap \\
       --split 80,10,10 \\
       --distributed-backend nccl \\
       --lr 0.0003 \\
       --lr-decay-style linear \\
       --min-lr 1e-6 \\
       --clip-grad 0.5 \\
       --warmup .05 \\
       --checkpoint-activations \\
       --log-interval 5 \\
       --save-interval 50 \\
       --eval-interval 100 \\
       --eval-iters 4 \\
       --fp16
"""
TORCH = f"""\
#! /bin/bash
export CUDA_VISIBLE_DEVICES=2,3
GPUS_PER_NODE=2
MASTER_ADDR=10.0.0.7
MASTER_PORT=6100
NNODES=3
NODE_RANK=0
WORLD_SIZE=$(($GPUS_PER_NODE*$NNODES))
BATCH=4
DATA_PATH=/corpus/news_text_document
OUT=ckpt
ARGS="--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --node_rank $NODE_RANK \
--master_addr $MASTER_ADDR --master_port $MASTER_PORT"

python -m torch.distributed.launch $ARGS \\
       ../pretrain_gpt2.py \\
{MEGATRON}
set +x
"""
DEEPSPEED = f"""\
#! /bin/bash
GPUS_PER_NODE=8
NNODES=2
export DLWS_NUM_WORKER=${{NNODES}}
export DLWS_NUM_GPU_PER_WORKER=${{GPUS_PER_NODE}}
script_path=$(realpath $0)
script_dir=$(dirname $script_path)
config_json="$script_dir/ds.json"
mp_size=2
BATCH=6
OUT=/ckpt/a
DATA_PATH=/corpus/news_text_document
stage=1
PA=true
PROFILE=false
gpt_options=" \\
{MEGATRON.replace("--model-parallel-size 1", "--model-parallel-size ${mp_size}").rstrip()} \\
"
deepspeed_options=" \\
   --deepspeed \\
   --deepspeed_config ${{config_json}} \\
   --zero-stage ${{stage}} \\
   --zero-reduce-bucket-size 4000
   "
if [ "${{PA}}" = "true" ]; then
chkp="--checkpoint-num-layers 1 \\
      --partition-activations"
fi
if [ "${{PROFILE}}" = "true" ]; then
chkp="${{chkp}} --profile-backward"
fi
full="${{gpt_options}} ${{deepspeed_options}} ${{chkp}}"
run_cmd="deepspeed LAUNCH ../pretrain_gpt2.py $@ ${{full}}"
echo ${{run_cmd}}
eval ${{run_cmd}}
set +x
"""
ALONE = "--num_nodes ${DLWS_NUM_WORKER} --num_gpus ${DLWS_NUM_GPU_PER_WORKER}"
LISTED = "--master_port 6200 -i 10.0.0.7:2,3@10.0.0.9:2,3 --hostfile hostfile"
VARUNA = (
    "python -m varuna.run_varuna --machine_list machines.out --gpus_per_node 4 --batch-size 64 "
    "--nstages 2 --chunk_size 4 --code_dir work train.py --lr 0.01 --epochs 3\n"
)
CONF = """\
HOMOGENEOUS_CLUSTER=false # true | false
MODEL='xl'
NPROC_PER_NODE=2
NNODES=5
WORLD_SIZE=$((NPROC_PER_NODE * NNODES))
GLOBAL_BATCH_SIZE=40
MICRO_BATCH_SIZE=2
TENSOR_MP_SIZE=1
DP_SIZE=2
PIPELINE_MP_SIZE=5
PARTITION="9-10-11-10-10"
NSYS=false
PROFILE=true
MASTER_PORT=6543
RELOAD_CONTAINER=false
CONTAINER_IMAGE_PATH="$HOME/images/torch.sqsh"
CONTAINER_PATH="/scratch/$USER/torch"
CONTAINER_NAME="torch"
export NCCL_SOCKET_IFNAME=ib0
"""
JOB = """\
#!/bin/bash
#SBATCH --nodes={nodes}
#SBATCH --partition={queue}
#SBATCH --gres=gpu:{gpu}:2
#SBATCH --time=2:30:00
#SBATCH --cpus-per-task=6
#SBATCH --account=lab7
#SBATCH --qos=long
#SBATCH --exclude=n[01-02]
GRES="gpu:{gpu}:2"
. _00_conf.sh
MASTER_ADDR='10.0.0.7'
srun --gres=$GRES --kill-on-bad-exit bash -c "./_01_run_inter.sh"
"""
INTER = """\
. ./_00_conf.sh
if [ "$RELOAD_CONTAINER" = "true" ]; then
  enroot remove -f $CONTAINER_NAME
fi
if [ ! -d "$CONTAINER_PATH" ]; then
  enroot create -n $CONTAINER_NAME $CONTAINER_IMAGE_PATH
fi
NODE_RANK=$SLURM_NODEID
enroot start --root --rw -m $HOME/corpus:/corpus -m /raw:/raw $CONTAINER_NAME \\
  bash -c "torchrun train.py"
"""
SUBMIT = """\
if [ $HOMOGENEOUS_CLUSTER = true ]; then
  sbatch _02_homo_job.sh
else
  sbatch _02_hetero_master_job.sh
  sbatch _02_hetero_slave_job.sh
fi
"""
HET = """\
#SBATCH --job-name=two-kinds
#SBATCH --nodes=1
#SBATCH --gres=gpu:a100:4
#SBATCH hetjob
#SBATCH --nodes=3
#SBATCH --gres=gpu:a10:4
export GLOO_SOCKET_IFNAME=eth0
module load cuda/12
srun --container-image=/images/a.sqsh --container-mounts=/corpus:/corpus:ro \\
  --container-workdir=/work nsys profile -o out/%q{RANK} --trace=cuda,nvtx \\
  torchrun --nnodes 4 --nproc_per_node 4 --rdzv_backend c10d train.py --lr ${LR:-0.1}
"""
DOCKER = """\
nvidia-docker run --ipc=host -it -v /corpus:/corpus -p 6000:6000 --net=host \\
   nvcr.io/nvidia/pytorch:24.01-py3 bash
torchrun --standalone --nproc_per_node=2 train.py
"""
FILES = {
    "torch": {"examples/x.sh": TORCH, "pretrain_gpt2.py": ""},
    "deepspeed": {
        "examples/x.sh": DEEPSPEED.replace("LAUNCH", ALONE),
        "pretrain_gpt2.py": "",
        "examples/ds.json": "{}",
    },
    "deepspeed-hosts": {
        "examples/x.sh": DEEPSPEED.replace("LAUNCH", LISTED),
        "pretrain_gpt2.py": "",
        "examples/ds.json": "{}",
        "examples/hostfile": "10.0.0.7 slots=8\n10.0.0.9 slots=8\n",
    },
    "varuna": {
        "x.sh": VARUNA,
        "machines.out": "10.0.0.7\n10.0.0.9\n",
        "work/train.py": "",
    },
    "conf": {
        "x.sh": CONF.replace("false # true", "true # true") + "torchrun train.py",
        "train.py": "",
    },
    "het": {"x.sh": HET, "train.py": ""},
    "docker": {"x.sh": DOCKER, "train.py": ""},
    "folder": {
        "_00_conf.sh": CONF,
        "_01_run_inter.sh": INTER,
        "_02_homo_job.sh": JOB.format(nodes=5, queue="q0", gpu="a10"),
        "_02_hetero_master_job.sh": JOB.format(nodes=1, queue="q1", gpu="a100"),
        "_02_hetero_slave_job.sh": JOB.format(nodes=4, queue="q2", gpu="a10"),
        "_03_submit.sh": SUBMIT,
        "train.py": "",
    },
    "texts": {**SCRIPTS, "_00_pretrain_gpt.py": ""},
}
"""By example: the files of its folder. What is converted is the x.sh, else the folder."""
ENVIRON = {"HOME": "/home/kim", "USER": "kim"}


def lay_out(folder: Path, name: str) -> Path:
    """The example's files; the path that --from gets."""
    for file, text in FILES[name].items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
    return next(folder.rglob("x.sh"), folder)


def convert(folder: Path, name: str) -> tuple[dict[str, object], list[str], str]:
    text, notes = translate_source(Source(path=lay_out(folder, name)), ENVIRON)
    return yaml.safe_load(text), notes, text


@pytest.mark.parametrize("name", FILES)
def test_each_example_becomes_a_conf_that_dry_runs(name: str, tmp_path: Path) -> None:
    source = lay_out(tmp_path, name)
    base = source if source.is_dir() else source.parent
    vjob = Vjob(base)
    made = vjob("init", "--from", source.name if source != base else ".")
    (base / "conf.yaml").write_text(made.stdout)
    shown = vjob("submit", "conf.yaml", "--dry-run")
    assert "Traceback" not in made.stderr + shown.stderr
    for line in made.stderr.splitlines():
        assert line.startswith("note: ") and f"#   {line.removeprefix('note: ')}\n" in made.stdout


def fill_args(conf: dict[str, Any]) -> list[str]:
    """The arguments of a conf's program, as a dry run fills them."""
    text = yaml.safe_dump({key: value for key, value in conf.items() if key != "container"})
    filled = parse_conf_lines(text, "conf.yaml", Path("/old"), environ={})[0]
    return list(fill_references(filled).program.args)


def test_a_launch_line_of_megatron_is_its_words_with_references_to_keys(tmp_path: Path) -> None:
    conf, notes, _ = convert(tmp_path, "torch")
    program = conf["program"]
    assert isinstance(program, dict) and program["script"] == "../pretrain_gpt2.py"
    words = re.sub(r"\$BATCH\b", "4", MEGATRON).replace("$OUT", "ckpt")
    words = words.replace("$DATA_PATH", "/corpus/news_text_document").replace("\\\n", " ")
    assert fill_args(conf) == words.split()
    assert conf["model"] == {"layers": 12, "hidden": 512, "heads": 8, "sequence": 256}
    assert conf["data"] == {"prefix": "/corpus/news_text_document"}
    assert conf["train"] == {
        "micro_batch_size": 4,
        "steps": 200,
        "schedule": {"decay_steps": 4000, "kind": "linear"},
        "checkpoint": {"every": 50},
        "optimizer": {"lr": 0.0003},
        "clip_grad_norm": 0.5,
        "log_every": 5,
        "evaluate": {"every": 100, "steps": 4},
    }
    assert conf["parallel"] == {"tensor": 1}
    args = program["args"]
    assert args[args.index("--min-lr") + 1] == "1e-6", "a float would be spelled 1e-06"
    assert conf["cluster"] == {
        "port": 6100,
        "nodes": [{"group": "master", "count": 3, "gpus": 4, "ranks": 2, "devices": [2, 3]}],
    }
    assert any("--node_rank 0 is left out" in note for note in notes)


def test_a_deepspeed_line_keeps_its_options_and_sets_what_ds_config_repeats(
    tmp_path: Path,
) -> None:
    conf, _, _ = convert(tmp_path, "deepspeed")
    program = conf["program"]
    assert isinstance(program, dict)
    assert (program["deepspeed"], program["config"]) == ("../pretrain_gpt2.py", "ds.json")
    args = program["args"]
    assert args[args.index("--model-parallel-size") + 1] == "2"
    assert "--partition-activations" in args and "--profile-backward" not in args
    assert "--deepspeed" in args
    assert args[args.index("--deepspeed_config") + 1] == "{ds_config}"  # in its place
    train = {"micro_batch_size": 6, "clip_grad_norm": 0.5, "log_every": 5, "precision": "fp16"}
    assert conf["train"] == {**train, "optimizer": {"lr": 0.0003}}
    assert conf["parallel"] == {"tensor": 2, "recompute": "full", "zero": 1}
    assert conf["cluster"] == {"nodes": [{"group": "master", "count": 2, "gpus": 8, "ranks": 8}]}


def test_hosts_of_deepspeed_are_counts_and_devices(tmp_path: Path) -> None:
    conf, _, _ = convert(tmp_path, "deepspeed-hosts")
    group = {"group": "master", "count": 2, "gpus": 8, "ranks": 2, "devices": [2, 3]}
    assert conf["cluster"] == {"port": 6200, "nodes": [group]}


def test_a_line_of_run_varuna_is_a_script_with_its_layout(tmp_path: Path) -> None:
    conf, notes, _ = convert(tmp_path, "varuna")
    assert conf["program"] == {
        "script": "work/train.py",
        "args": ["--lr", "0.01", "--epochs", "3"],
        "arguments": "varuna",
    }
    assert conf["workdir"] == "work"
    assert conf["parallel"] == {"pipeline": 2}
    assert conf["train"] == {"micro_batch_size": 4, "global_batch_size": 64}
    assert conf["cluster"] == {"nodes": [{"group": "master", "count": 2, "gpus": 4, "ranks": 4}]}
    assert not any("--stage_to_rank_map" in note for note in notes)
    assert any("set morph: {enabled: true}" in note for note in notes)


def test_a_folder_of_master_and_slave_scripts_is_two_groups(tmp_path: Path) -> None:
    conf, notes, _ = convert(tmp_path, "folder")
    assert conf["cluster"] == {
        "walltime_min": 150,
        "account": "lab7",
        "qos": "long",
        "exclude": ["n[01-02]"],
        "nodes": [
            {"group": "master", "count": 1, "queue": "q1", "gpus": "a100:2", "cpus": 6},
            {"group": "slave", "count": 4, "queue": "q2", "gpus": "a10:2", "cpus": 6},
        ],
    }
    assert conf["container"] == {
        "reuse": True,
        "image": "~/images/torch.sqsh",
        "scratch": "/scratch/kim",
        "runtime": "enroot",
        "remap_root": True,
        "writable": True,
        "mounts": ["~/corpus:/corpus", "/raw:/raw"],
    }
    assert conf["env"] == {"NCCL_SOCKET_IFNAME": "ib0"}
    assert not any("_02_homo_job" in note for note in notes), "it is not submitted"


def test_scripts_within_texts_are_followed_to_the_launch_and_its_container(tmp_path: Path) -> None:
    conf, notes, _ = convert(tmp_path, "texts")
    program = conf["program"]
    assert isinstance(program, dict) and program["script"] == "_00_pretrain_gpt.py"
    args = fill_args(conf)
    assert args[:2] == ["--num-layers", "4"] and args[-2:] == ["--split", "100,0,0"]
    for option, value in {
        "--balance": "3-1",
        "--timing-log-option": "all",
        "--lr-warmup-fraction": ".01",
        "--data-path": "/root/trainer/my-gpt2_text_document",
    }.items():
        assert args[args.index(option) + 1] == value
    assert conf["name"] == "pretrain_gpt"
    assert conf["model"] == {"layers": 4, "hidden": 64, "heads": 4, "sequence": 32}
    assert conf["parallel"] == {"tensor": 1, "pipeline": 2, "partition": "3-1"}
    assert conf["cluster"] == {
        "port": 6787,
        "nodes": [
            {
                "group": "master",
                "count": 1,
                "queue": "gpu1",
                "gpus": "a100:2",
                "cpus": 2,
                "ranks": 2,
            },
            {"group": "slave", "count": 1, "queue": "gpu2", "gpus": "a10:2", "cpus": 2, "ranks": 2},
        ],
    }
    assert conf["container"] == {
        "reuse": True,
        "image": "~/cluster/image/pytorch-23.04.sqsh",
        "scratch": "/scratch/enroot/kim/data",
        "runtime": "enroot",
        "remap_root": True,
        "writable": True,
        "mounts": [
            "~/cluster/trainer:/root/checkout",
            "~/cluster/log2:/root/log2",
            "~/cluster/small:/root/indexes",
            "/scratch/enroot/kim/data/copies/root/trainer:/root/trainer",
        ],
    }
    assert "profile" not in conf
    assert not any("echo" in note or "hostname" in note for note in notes)


def test_a_het_job_with_pyxis_and_nsys_is_groups_a_container_and_a_profile(tmp_path: Path) -> None:
    conf, notes, _ = convert(tmp_path, "het")
    assert conf["name"] == "two-kinds"
    assert conf["program"] == {"script": "train.py", "args": ["--lr", "0.1"]}
    assert conf["cluster"] == {
        "nodes": [
            {"group": "master", "count": 1, "gpus": "a100:4", "ranks": 4},
            {"group": "group1", "count": 3, "gpus": "a10:4", "ranks": 4},
        ]
    }
    assert conf["container"] == {
        "image": "/images/a.sqsh",
        "runtime": "pyxis",
        "mounts": ["/corpus:/corpus:ro"],
        "workdir": "/work",
    }
    assert conf["profile"] == {"nsys": True, "options": ["--trace=cuda,nvtx"]}
    assert conf["setup"] == ["module load cuda/12"]
    assert conf["env"] == {"GLOO_SOCKET_IFNAME": "eth0"}
    assert any("--rdzv_backend c10d is left out" in note for note in notes)


def test_braces_of_an_argument_are_no_reference_to_the_conf(tmp_path: Path) -> None:
    conf, _ = convert_line(tmp_path, "torchrun train.py --name 'a${b}' --to ~/x")
    args = ["--name", "a$${b}", "--to", "/home/kim/x"]
    assert conf["program"] == {"script": "train.py", "args": args}


def test_docker_run_is_an_image_and_its_mounts(tmp_path: Path) -> None:
    conf, _, _ = convert(tmp_path, "docker")
    assert conf["container"] == {
        "image": "docker://nvcr.io/nvidia/pytorch:24.01-py3",
        "mounts": ["/corpus:/corpus"],
    }


def convert_line(folder: Path, line: str) -> tuple[dict[str, object], list[str]]:
    (folder / "train.py").touch()
    (folder / "x.sh").write_text(f"#!/bin/bash\n{line}\n")
    text, notes = translate_source(Source(path=folder / "x.sh"), ENVIRON)
    return yaml.safe_load(text), notes


@pytest.mark.parametrize(
    ("line", "args"),
    [
        ("torchrun train.py data.txt", ["data.txt"]),
        ("torchrun train.py a b --lr 1 --n=x c", ["a", "b", "--lr", "1", "--n=x", "c"]),
        ("torchrun train.py --name=x --flag", ["--name=x", "--flag"]),
        ("python -u -X dev -W ignore train.py --a 1", ["--a", "1"]),
        ("bash -lc 'python train.py --a 1'", ["--a", "1"]),
        ("srun sh -ec 'exec torchrun train.py --a 1'", ["--a", "1"]),
        ("env A=1 nohup python3.11 -m torch.distributed.run train.py 7", ["7"]),
    ],
)  # fmt: skip
def test_arguments_of_a_script_are_handed_on(line: str, args: list[str], tmp_path: Path) -> None:
    conf, _ = convert_line(tmp_path, line)
    python = {"python": "python3.11"} if "python3.11" in line else {}
    assert conf["program"] == {"script": "train.py", "args": args, **python}


@pytest.mark.parametrize("line", ["python setup.py install", "python -m pip install x", "python"])
def test_other_python_lines_start_no_training(line: str, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        convert_line(tmp_path, line)


def convert_megatron(folder: Path, options: str) -> tuple[dict[str, object], list[str]]:
    (folder / "pretrain_gpt.py").touch()
    return convert_line(folder, f"torchrun pretrain_gpt.py --mock-data {options}")


@pytest.mark.parametrize(
    ("words", "parallel", "model"),
    [
        # hidden is no multiple of heads: the model goes, its words stay
        ("--num-layers 2 --hidden-size 10 --num-attention-heads 3", None, None),
        # a T5 has no model of ours, and its partition is kept
        (
            "--encoder-num-layers 2 --decoder-num-layers 2 --num-attention-heads 3 "
            "--pipeline-model-parallel-size 1 --balance 2-2",
            {"pipeline": 1},
            None,
        ),
        ("--hidden-size=12 --num-layers=2 --num-attention-heads=3", None, (2, 12, 3)),
        ("--train-iters 3 --train-iters 4 --lr 1e-4 --lr 0.1 --weight-decay 1e-2", None, None),
        ("--tensor-model-parallel-size 1 --weight-decay .1 --data-path a_b --save x", None, None),
    ],
)
def test_words_of_megatron_are_the_scripts_own(
    words: str, parallel: object, model: tuple[int, ...] | None, tmp_path: Path
) -> None:
    words = f"--tensor-model-parallel-size 1 {words}"
    (tmp_path / "train.py").touch()
    conf, _ = convert_line(tmp_path, f"torchrun train.py {words}")
    assert fill_args(conf) == words.split()
    has = conf.get("model")
    assert (tuple(has.values()) if isinstance(has, dict) else None) == (
        model
        and tuple(
            {"layers": model[0], "hidden": model[1], "heads": model[2]}[key] for key in has or ()
        )
    )


def test_the_folder_in_which_bash_starts_it_is_the_workdir(tmp_path: Path) -> None:
    lines = "cd .\ncd code\ncd -\ncd deep/../code/deep\npython train.py\ncd later"
    conf, _ = convert_line(tmp_path, lines)
    assert conf["workdir"] == "code/deep"
    assert conf["program"] == {"script": "code/deep/train.py", "args": []}
    assert "workdir" not in convert_line(tmp_path, "python train.py\ncd code")[0]


def test_what_srun_says_otherwise_than_sbatch_is_told(tmp_path: Path) -> None:
    head = "#SBATCH --gres=gpu:a10:4\n#SBATCH --partition=q1\n#SBATCH --nodes=2\n"
    _, notes = convert_line(tmp_path, f"{head}srun --gres=gpu:a10:2 --partition=q1 python train.py")
    assert notes == ["x.sh:5: srun --gres=gpu:a10:2 is not used: #SBATCH says gpu:a10:4"]
    conf, notes = convert_line(
        tmp_path, f"{head}srun --gres=gpu:a10:4 --partition=q2 python train.py"
    )
    assert notes == ["x.sh:5: srun --partition=q2 is not used: #SBATCH says q1"]
    assert conf["cluster"] == {
        "nodes": [{"group": "master", "count": 2, "gpus": "a10:4", "queue": "q1", "ranks": 1}]
    }


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("train.py", "import torch\nNNODES=2\n"),
        ("notes.txt", "a few words on how it went\n"),
        ("x.sh", "echo hello\nmkdir -p log\n"),
        ("x.sh", ""),
        ("conf.yaml", "name: a\n"),
        ("a.out", "\x7fELF\0\0 NNODES=2"),
        ("setup.sh", "python setup.py install\n"),
    ],
)
def test_a_file_that_starts_no_training_is_refused(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=r"is not supported by --from"):
        translate_source(Source(path=tmp_path / name), ENVIRON)
    shown = Vjob(tmp_path)("init", "--from", name, code=2)
    assert shown.stdout == "" and "a script for bash" in shown.stderr


def test_a_script_that_slurm_kept_ends_with_a_nul(tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text("#!/bin/bash\n#SBATCH -N 1\ntorchrun train.py\n\0")
    page, _ = translate_source(Source(path=tmp_path / "job.sh"), ENVIRON)
    assert "program: {script: train.py" in page


def test_a_dry_run_warns_of_files_that_only_the_cluster_may_have(tmp_path: Path) -> None:
    lay_out(tmp_path, "torch")
    vjob = Vjob(tmp_path / "examples")
    (vjob.folder / "conf.yaml").write_text(vjob("init", "--from", "x.sh").stdout)
    assert "a submit from this machine would be refused" in vjob(
        "submit", "conf.yaml", "--dry-run"
    ).stderr  # fmt: skip
    refused = vjob("submit", "conf.yaml", code=2)
    assert "/corpus/news_text_document.bin" in refused.stderr

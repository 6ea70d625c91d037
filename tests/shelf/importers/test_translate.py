"""Translation: the words of a script become the same in a conf, or a refusal with the reason."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from vjob.jobs.conf.slurm_words import to_gigabytes, to_minutes, to_node_list
from vjob.jobs.errors import InputError
from vjob.shelf.importers.refusal import ScriptRefusedError
from vjob.shelf.importers.translate import Source, translate_source

ENVIRON = {"HOME": "/home/kim", "USER": "kim"}


def translate(folder: Path, text: str, *args: str, **how: Any) -> tuple[dict[str, Any], str]:
    """The conf, and its notes."""
    (folder / "x.sh").write_text(text)
    source = Source(path=folder / "x.sh", args=args, **how)
    made, notes = translate_source(source, ENVIRON)
    return yaml.safe_load(made), "\n".join(notes)


def refuse(folder: Path, text: str) -> str:
    with pytest.raises(InputError) as error:
        translate(folder, text)
    return str(error.value)


@pytest.mark.parametrize(
    ("line", "program"),
    [
        ("python -m pkg.train --lr 1", {"module": "pkg.train", "args": ["--lr", "1"]}),
        ("torchrun -m pkg.train a", {"module": "pkg.train", "args": ["a"]}),
        ("torchrun --no-python ./run a", "torchrun --no-python ./run a"),
        ("accelerate launch --num_processes 4 t.py", "accelerate launch --num_processes 4 t.py"),
        ("uv run --with x python t.py", "uv run --with x python t.py"),
        ("poetry run python t.py", "poetry run python t.py"),
        ("conda run -n env python t.py", "conda run -n env python t.py"),
        ("pixi run train", "pixi run train"),
        ("axolotl train a.yaml", "axolotl train a.yaml"),
        ("apptainer exec --nv a.sif python t.py", "apptainer exec --nv a.sif python t.py"),
        ("mpirun -np 4 python t.py", "mpirun -np 4 python t.py"),
        ("numactl -N 0 python t.py", "numactl -N 0 python t.py"),
        ("fairseq-train data --lr 1", "fairseq-train data --lr 1"),
        ("lightning run t.py --lr 1", "lightning run t.py --lr 1"),
        ("fabric run --devices 2 t.py", "fabric run --devices 2 t.py"),
        ("horovodrun -np 2 python t.py", "horovodrun -np 2 python t.py"),
        ("composer -n 2 t.py --lr 1", "composer -n 2 t.py --lr 1"),
        ("colossalai run --nproc_per_node 2 t.py", "colossalai run --nproc_per_node 2 t.py"),
        ("ray job submit -- python t.py", "ray job submit -- python t.py"),
        ("singularity exec --nv a.sif python t.py", "singularity exec --nv a.sif python t.py"),
        ("ch-run img -- python t.py", "ch-run img -- python t.py"),
        ("shifter --image=x python t.py", "shifter --image=x python t.py"),
        ("docker exec c python t.py", "docker exec c python t.py"),
        ("hatch run train", "hatch run train"),
        ("pipenv run python t.py", "pipenv run python t.py"),
        ("micromamba run -n e python t.py", "micromamba run -n e python t.py"),
        ("mpiexec -n 2 ./run 1", "mpiexec -n 2 ./run 1"),
        (
            "python -m accelerate.commands.launch --num_processes 2 t.py",
            "python -m accelerate.commands.launch --num_processes 2 t.py",
        ),
        ("taskset -c 0 python t.py", "taskset -c 0 python t.py"),
        ("timeout 10 python t.py", "timeout 10 python t.py"),
        ("env -u A B=1 python t.py", "env -u A B=1 python t.py"),
        ("parallel python t.py ::: 1 2", "parallel python t.py ::: 1 2"),
        ("ssh node1 python t.py", "ssh node1 python t.py"),
        (
            "srun apptainer exec --nv a.sif bash -c 'torchrun t.py'",
            {"command": ["apptainer", "exec", "--nv", "a.sif", "bash", "-c", "torchrun t.py"]},
        ),
        ("srun numactl -N 0 python t.py &", "numactl -N 0 python t.py"),
        ("time -p setsid python t.py 1", {"script": "t.py", "args": ["1"]}),
        ("srun python t.py 'a  b' &", {"script": "t.py", "args": ["a  b"]}),
        ("srun ./run.bin 3 | tee log", "./run.bin 3"),
        ("python t.py --max-tokens 4096", {"script": "t.py", "args": ["--max-tokens", "4096"]}),
        ("python t.py --api-key=abc", {"script": "t.py", "args": []}),
    ],
)
def test_a_program_is_the_scripts_own_word_for_word(
    line: str, program: dict[str, Any] | str, tmp_path: Path
) -> None:
    conf, _ = translate(tmp_path, line)
    if isinstance(program, str):
        program = {"command": program.split()}
    assert conf["program"] == program


def test_what_only_the_job_knows_is_filled_in_there(tmp_path: Path) -> None:
    text = "#SBATCH -N 2\nsrun python t.py --out r-$SLURM_JOB_ID 'a b' --at $(hostname):29500\n"
    conf, notes = translate(tmp_path, text)
    line = """exec python t.py --out r-"$${SLURM_JOB_ID}" 'a b' --at "$${MASTER_ADDR}":29500"""
    assert conf["program"] == {"command": ["bash", "-c", line]}
    assert "the job's shell expands ${MASTER_ADDR}, ${SLURM_JOB_ID}" in notes


def test_a_variable_with_the_first_nodes_name_reaches_the_ranks(tmp_path: Path) -> None:
    head = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
    text = f"#SBATCH -N 2\nexport HEAD={head}\nexport URL=tcp://$HEAD:29511\n"
    text += "export BOTH=$HEAD-$SLURM_JOB_ID\nexport OUT=o-$SLURM_JOB_ID\nsrun python t.py"
    conf, notes = translate(tmp_path, text)
    assert conf["env"] == {
        "HEAD": "${master.address}", "URL": "tcp://${master.address}:29511"
    }  # fmt: skip
    assert conf["setup"] == ['export OUT=o-"${SLURM_JOB_ID}"']  # before the nodes meet
    assert "BOTH=${MASTER_ADDR}-${SLURM_JOB_ID} is left out" in notes


@pytest.mark.parametrize(
    ("text", "reason", "said"),
    [
        ("python t.py --lr $1", "ARGUMENTS", r"x.sh:1: .*\$1; give the script's arguments"),
        ("torchrun t.py --lr $1 --wd $WD", "ARGUMENTS VARIABLES", r"\$\{WD\}; give .*; set WD in"),
        ("mpirun -np 2 python3.6 $*", "ARGUMENTS", r"\$@; give the script's arguments"),
        ("exec \"$@\"", "ARGUMENTS", r"\$@; give the script's arguments"),
        ("python t.py --lr $LR", "VARIABLES", r"\$\{LR\}; set LR in your shell"),
        ("$RUN --lr 1", "VARIABLES", r"\$\{RUN\}; set RUN in your shell"),
        ("python t.py --x $(ls | head -1)", "OUTPUTS", r"\$\(ls\); replace these commands"),
        ("#SBATCH -p q\npython t.py --n $((SLURM_NNODES * 8))", "COUNTS",
         "give the counts in #SBATCH lines"),
        ("python t.py --data '<your data>'", "PLACEHOLDERS", "<your data> must be replaced first"),
        ("D='<your dir>/x'\npython t.py --d $D", "PLACEHOLDERS", "<your dir> must be replaced"),
        ("#SBATCH --nodes=my_count\npython t.py", "PLACEHOLDERS",
         "x.sh:1: --nodes=my_count must be replaced"),
        ("if true; then\npython t.py", "NOTHING SYNTAX",
         "bash says line 3: syntax error: unexpected end of file"),
        ("python t.py --n <how_many>", "NOTHING PLACEHOLDERS SYNTAX",
         "bash says line 1: syntax error"),
        (". bad.sh\npython t.py --d $D", "PLACEHOLDERS SYNTAX VARIABLES",
         "bash says line 1: syntax error"),
        ("echo hello\nmodule load x", "NOTHING", "starts no program"),
        ("set -u\n[ $1 = go ] && python t.py", "ARGUMENTS NOTHING",
         "unbound variable; it needs"),
        ("[ $1 = train ] && python t.py", "ARGUMENTS NOTHING", r"it needs \$1"),
        ("NNODES=2\nMODEL=xl\n", "NOTHING", "starts no program"),
        ("[ -f /none/x ] && echo", "NOTHING", r"it asks for /none/x \(x.sh:1\)"),
        (": ${LR:?is needed}\npython t.py $LR", "VARIABLES", "set LR in your shell"),
        ("while :; do :; done", "ENDLESS NOTHING", "script does not end"),
        ("python a.py\npython b.py", "SEVERAL",
         r"2 different programs.*x.sh:1: python a.py\n  x.sh:2: python b"),
        ("for i in 1 2; do torchrun t.py $i; done", "SEVERAL", "2 different programs"),
        ("set -u\nA=$1\npython t.py --lr $LR", "ARGUMENTS VARIABLES", "script's arguments"),
        ("for i in d/*.yaml; do torchrun t.py $i; done", "FILES", "that has the pattern's files"),
        ("torchrun t.py --at $(head -n 1 hosts):29500", "FILES OUTPUTS", "bash says head: .*hosts"),
        ("A=$(grep a hosts | cut -d: -f2)\npython t.py --a $A", "FILES OUTPUTS", r"\$\(grep\)"),
        ("xargs -a hosts -I {} ssh {} torchrun t.py", "OUTPUTS", r"\$\(xargs\)"),
        ("ls d | xargs -n 1 python t.py", "OUTPUTS", r"x.sh:1: .*\$\(xargs\)"),
        ("find d | xargs -n 9 fetch", "NOTHING", "starts no program"),
        ("[ -f hosts ] || exit\nssh $(head -1 hosts) log\nxargs -a hosts -I@ ssh @ torchrun t.py",
         "SEVERAL", "x.sh:3"),
        ("python t.py --a x$(squeue | awk '{print $3}')", "OUTPUTS", r"x\$\(squeue\)"),
        ("python t.py --n $(ls ckpt | wc -l)", "OUTPUTS", r"\$\(ls\)"),
        ("#SBATCH -N 2\npython t.py tcp://${SLURM_NODELIST:0:9}:4000", "OUTPUTS",
         r"tcp://\$\(part of a name\):4000"),
        ("python t.py --n $(echo $1 | cut -d: -f2)", "ARGUMENTS", r"\$1"),
    ],
)  # fmt: skip
def test_a_script_is_refused_with_the_reason(
    text: str, reason: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "bad.sh").write_text("D=<your folder>\n")
    with pytest.raises(ScriptRefusedError) as error:
        translate(tmp_path, text)
    assert " ".join(sorted(one.name for one in error.value.reasons)) == reason
    assert re.search(said, str(error.value), re.DOTALL), str(error.value)


@pytest.mark.parametrize(
    ("text", "program", "note"),
    [
        ("while :; do\n[ -f done ] && break\n./train 1\nsleep 1\ndone", "./train 1",
         "x.sh:3: the script repeats a program"),
        ("srun ./check\nsrun torchrun t.py", "t.py", "x.sh:1: left out"),
        ("srun --export=ALL ./run $SLURM_TMPDIR/data", "bash", "expands ${SLURM_TMPDIR}"),
        ("while read H; do echo $H; done < hosts\n./run 1", "./run 1",
         "bash says line 1: hosts: No such file"),
        ("[ -f hosts ] || exit 1\n./run 1", "./run 1", "is not here, but is assumed to exist"),
        ("[ -f hosts ] && A=1\n./run 1", "./run 1", "is not here; the script goes on without"),
        ("srun -J $1 ./run 1", "./run 1", "srun --job-name=$1 is left out: its value is not given"),
        ("#SBATCH -p q\nsrun torchrun --nproc_per_node $SLURM_GPUS_ON_NODE t.py", "t.py",
         "--nproc_per_node (a count of the job) is not known"),
        ("export MASTER_PORT=$((12000 + RANDOM % 2000))\n./run 1", "./run 1",
         "MASTER_PORT=13039 is not used: each run chooses a new"),
        ("deepspeed train.py", "train.py", "uses all GPUs of a node, but their number is not"),
        ("A=$(seq 9000 | tail -1) B=$(head -1 x.sh; sort none)\n./run $A", "./run 9000", ""),
        ("A=$(nvidia-smi -L | wc -l)\n./run 1", "./run 1", ""),
        ("find d | xargs fetch\n./run 1", "./run 1", "x.sh:1: not done: fetch"),
        ("srun -n4 --mpi=pmix ./run 1", "./run 1", "--mpi=pmix is left out"),
        ("ls d | xargs rm\nA=$(echo ' 1 ' | xargs)\n./run $A", "./run 1", ""),
    ],
)  # fmt: skip
def test_one_program_is_found_among_what_surrounds_it(
    text: str, program: str, note: str, tmp_path: Path
) -> None:
    conf, notes = translate(tmp_path, text)
    [found] = (
        conf["program"][kind] for kind in ("script", "command", "deepspeed")
        if kind in conf["program"]
    )  # fmt: skip
    assert (found[0] if isinstance(found, list) and program == "bash" else found) in (
        program, program.split())  # fmt: skip
    assert note in notes


def test_what_was_asked_for_may_be_given(tmp_path: Path) -> None:
    conf, _ = translate(tmp_path, "python t.py --lr $1 ${@:2}\n", "0.1", "a", "b")
    assert conf["program"]["args"] == ["--lr", "0.1", "a", "b"]
    conf, _ = translate(tmp_path, "python a.py\npython b.py\n", line=2)
    assert conf["program"]["script"] == "b.py"


def test_preparations_beside_a_step_are_told(tmp_path: Path) -> None:
    conf, notes = translate(tmp_path, "pip install x\npython prepare.py\nsrun torchrun t.py\n")
    assert conf["program"]["script"] == "t.py"
    assert "x.sh:1: not done: pip install x" in notes
    assert "x.sh:2: left out, because a conf starts one program: python prepare.py" in notes


LEFT_OUT = """\
#!/bin/bash
#SBATCH -N 2 --signal=B:USR1@60
set -e
for i in 1 2; do mkdir -p out/$i; done
ulimit -n 4096
mkdir new
trap 'scontrol requeue $SLURM_JOB_ID' USR1
export OMP_NUM_THREADS=1
echo "start $(date)" $RANDOM; unset XDG_RUNTIME_DIR SLURM_MEM_PER_CPU X
nvidia-smi
srun mkdir -p /tmp/scratch
echo a > hosts
srun bash -c 'RANK=$SLURM_PROCID python t.py' > train.log 2>&1
N=$(python -c 'print(1)')
rm -f out/old
scontrol update JobId=$SLURM_JOB_ID Nice=5
srun python other.py | tee \\
  -a other.log
python -c 'print("evaluate")'
srun python other.py
kill $!
rm -r $TMPDIR/a
"""


def test_each_line_with_an_effect_is_taken_or_told(tmp_path: Path) -> None:
    """Several were dropped in silence, and a line inside `bash -c` was said to be line 1."""
    (tmp_path / "x.sh").write_text(LEFT_OUT)
    made, notes = translate_source(Source(path=tmp_path / "x.sh", line=13), ENVIRON)
    conf, told = yaml.safe_load(made), "\n".join(notes)
    assert conf["setup"] == [
        "mkdir -p out/1", "mkdir -p out/2", "ulimit -n 4096", "mkdir -p new",
        "unset XDG_RUNTIME_DIR", "unset X", "mkdir -p /tmp/scratch",
    ]  # fmt: skip
    assert "signal_before_end_s" not in str(conf)
    assert "x.sh:8: OMP_NUM_THREADS=1 -> env" in made and "x.sh:13: t.py -> program" in made
    for line, part in (
        (2, "--signal=B:USR1@60 is left out: the trap of x.sh:7 acts on it"),
        (7, "not done: trap 'scontrol requeue $SLURM_JOB_ID' USR1"),
        (9, "not done: unset SLURM_MEM_PER_CPU"),
        (12, "hosts is not written"),
        (13, "train.log is not written: "),
        (15, "not done: rm -f out/old; it follows the program"),
        (16, "not done: scontrol update"),
        (17, "left out, because a conf starts one program: srun python other.py"),
        (18, "other.log is not written: "),
        (19, "not done: python -c"),
        (20, "the script starts this 2 times"),
        (21, "not done: kill"),
        (22, "not done: rm -r '${TMPDIR}/a'"),
    ):
        assert f"x.sh:{line}: {part}" in told, part
    for absent in ("date is", "RANDOM", "print(1)", "nvidia-smi", "echo", "x.sh:1:"):
        assert absent not in told, told


def test_a_folder_and_ranks_are_those_of_the_launch(tmp_path: Path) -> None:
    """A text for `bash -c` was read in the script's own folder, whatever `cd` came before it."""
    conf, _ = translate(tmp_path, "cd /repo\nsrun bash -c 'python t.py'\n")
    assert conf["workdir"] == "/repo"
    job = "#SBATCH -N 2 --ntasks-per-node=1\nsrun -o a.log accelerate launch t.py"
    (tmp_path / "x.sh").write_text(job)
    made, _ = translate_source(Source(path=tmp_path / "x.sh"), ENVIRON)
    assert "srun --output=a.log -> no key of the conf, as lines are kept" in made
    assert "--ntasks-per-node=1 -> no key of the conf, as the launcher counts the ranks\n" in made


@pytest.mark.parametrize(
    ("signal", "said"),
    [
        ("USR1@60", ""),
        ("TERM@60", "each rank gets SIGUSR1 instead"),
        ("B:SIGUSR1@60", "each rank gets SIGUSR1 instead"),
    ],
)
def test_a_signal_that_the_ranks_did_not_get_is_told(
    signal: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "x.sh").write_text(f"#SBATCH -N 1 --signal={signal}\nsrun python t.py\n")
    made, notes = translate_source(Source(path=tmp_path / "x.sh"), ENVIRON)
    assert "signal_before_end_s: 60" in made
    assert said in "\n".join(notes) and (f"{signal} -> cluster" in made) == (not said)


@pytest.mark.parametrize(
    ("options", "group"),
    [
        ("-N 2 --ntasks-per-node=4 -c 16", {"count": 2, "cpus": 64, "ranks": 4}),
        ("-N 2 -n 8 -c 2", {"count": 2, "cpus": 8, "ranks": 4}),
        ("-N 2 --ntasks-per-node=1 --gpus=16", {"count": 2, "gpus": 8, "ranks": 1}),
        ("-N 1 -n 4 --gpus-per-task=1", {"count": 1, "gpus": 4, "ranks": 4}),
        ("-n 4 --ntasks-per-node=2 --gpus-per-task=l40s:1",
         {"count": 2, "gpus": "l40s:2", "ranks": 2}),
        ("-N 1 -n 4 -c 2 --mem-per-cpu=4G", {"count": 1, "cpus": 8, "memory_gb": 32, "ranks": 4}),
        ("-N 1 -n 4 -c 2 --mem-per-cpu=3900M",
         {"count": 1, "cpus": 8, "memory_gb": 31, "ranks": 4}),
        ("-N 2 -n 8 --mem-per-cpu=4G", {"count": 2, "cpus": 4, "memory_gb": 16, "ranks": 4}),
        ("--mem-per-cpu=4G", {"count": 1, "cpus": 1, "memory_gb": 4, "ranks": 1}),
        ("-N 1 --ntasks-per-node=8", {"count": 1, "cpus": 8, "ranks": 8}),
        ("-N 1 --ntasks-per-node=8 --gres=gpu:8 --mem-per-cpu=4G",
         {"count": 1, "gpus": 8, "ranks": 8}),
        ("-N 1 -n 4 -c 2 --exclusive --mem-per-cpu=4G", {"count": 1, "cpus": 8, "ranks": 4}),
        ("-N 1 --gres=gpu:a100:4 --mem-per-gpu=10G", {"count": 1, "gpus": "a100:4",
                                                      "memory_gb": 40, "ranks": 1}),
    ],
)  # fmt: skip
def test_amounts_are_those_of_a_node(options: str, group: dict[str, Any], tmp_path: Path) -> None:
    conf, _ = translate(tmp_path, f"#SBATCH {options}\nsrun python t.py\n")
    assert conf["cluster"]["nodes"] == [{"group": "master", **group}]


def test_what_was_taken_names_the_keys_that_it_became(tmp_path: Path) -> None:
    """Slurm's one task of a node, torchrun, was said to be its ranks, and torchrun's to be GPUs."""
    script = "#SBATCH -N 2 --ntasks-per-node=1 --gpus-per-node=a100:2\nsrun torchrun "
    (tmp_path / "x.sh").write_text(f"{script}--nproc_per_node 2 t.py\n")
    made, _ = translate_source(Source(path=tmp_path / "x.sh"), ENVIRON)
    assert "ranks: 2" in made and "--nproc_per_node 2 -> cluster.nodes[0].ranks\n" in made
    assert "--ntasks-per-node=1 -> no key of the conf, as the launcher counts the ranks\n" in made
    assert "--gpus-per-node=a100:2 -> cluster.nodes[].gpus\n" in made


def test_tasks_of_a_program_that_is_started_once_are_not_its_ranks(tmp_path: Path) -> None:
    """`--ntasks=8 -> cluster.nodes[].ranks` stood above `ranks: 1`."""
    (tmp_path / "x.sh").write_text("#SBATCH -N 1 --ntasks=8\npython t.py\n")
    made, _ = translate_source(Source(path=tmp_path / "x.sh"), ENVIRON)
    assert "--ntasks=8 -> no key of the conf, as the script starts the program once\n" in made
    assert "cpus: 8" in made and "ranks: 1" in made


def test_options_of_sbatch_are_keys_or_are_told(tmp_path: Path) -> None:
    head = "#SBATCH -N 1 --signal=USR1@90 -D /w --mail-type=END -d singleton --array=3-5 -t 1:30:00"
    conf, notes = translate(tmp_path, f"{head}\nsrun python t.py $SLURM_ARRAY_TASK_ID\n")
    assert conf["workdir"] == "/w" and conf["program"]["args"] == ["3"]
    assert conf["cluster"]["sbatch"] == {"mail-type": "END", "dependency": "singleton"}
    assert (conf["cluster"]["signal_before_end_s"], conf["cluster"]["walltime_min"]) == (90, 90)
    assert "x.sh:1: --array=3-5 is left out" in notes
    assert "x.sh:2: the conf has the values for SLURM_ARRAY_TASK_ID 3" in notes


def test_a_conf_has_one_task_of_an_array(tmp_path: Path) -> None:
    """The job of a conf is no array, so nothing in it fills in the number of a task."""
    run = "srun python t.py $SLURM_ARRAY_TASK_ID -o $SLURM_ARRAY_JOB_ID\n"
    conf, _ = translate(tmp_path, f"#SBATCH --array=[31,33]\n{run}")
    assert "t.py 31 -o" in conf["program"]["command"][2]
    assert "$${SLURM_JOB_ID}" in conf["program"]["command"][2]
    with pytest.raises(InputError, match="set SLURM_ARRAY_TASK_ID in your shell"):
        translate(tmp_path, f"#SBATCH -N 1\n{run}")
    environ = {**ENVIRON, "SLURM_ARRAY_TASK_ID": "7"}
    made, notes = translate_source(Source(path=tmp_path / "x.sh"), environ)
    assert "t.py 7 -o" in made and "x.sh:2: the conf has the values for" in "\n".join(notes)


def test_the_rank_of_a_node_stays_open_beside_what_the_job_fills_in(tmp_path: Path) -> None:
    inner = (
        "torchrun_like t.py --rank \\$SLURM_PROCID --at \\$SLURMD_NODENAME --of \\$SLURM_JOB_GPUS"
    )
    conf, _ = translate(tmp_path, f'#SBATCH -N 2\nsrun bash -c "{inner}"\n')
    line = conf["program"]["command"][2]
    names = ("SLURM_PROCID", "SLURMD_NODENAME", "SLURM_JOB_GPUS")
    assert all(f'"$${{{name}}}"' in line for name in names), line


def test_files_that_prepare_the_shell_are_setup(tmp_path: Path) -> None:
    """`conda activate` works only in a shell that has read conda.sh, and bash looks for `activate`
    in PATH."""
    text = """\
source ~/.bashrc
source "$(conda info --base)/etc/profile.d/conda.sh"
source ${CONDA_BASE:-$HOME/miniconda3}/etc/profile.d/conda.sh
eval "$(conda shell.bash hook)"
conda activate torch
source activate torch
. venv/bin/activate
srun python t.py
"""
    conf, notes = translate(tmp_path, text)
    assert conf["setup"] == [
        "source ~/.bashrc || true",
        'source "$(conda info --base)/etc/profile.d/conda.sh"',
        "source ~/miniconda3/etc/profile.d/conda.sh",
        'eval "$(conda shell.bash hook)"',
        "conda activate torch",
        "source activate torch",
        f"source {tmp_path}/venv/bin/activate",
    ]
    assert "not read" in notes and "not done" not in notes


def test_what_differs_from_run_to_run_is_answered_once(tmp_path: Path) -> None:
    conf, notes = translate(tmp_path, "srun python t.py r-$(date +%Y) $RANDOM\n")
    assert re.fullmatch(r"r-\d{4} \d+", " ".join(conf["program"]["args"]))
    assert "x.sh:1: date +%Y was evaluated once" in notes
    assert "x.sh:1: RANDOM was evaluated once" in notes


@pytest.mark.parametrize(
    ("others", "read"),
    [
        ({"a.sh": "python t.py"}, False),
        ({"a.sh": "python t.py --lr $LR"}, True),  # the folder has no start that needs nothing
    ],
)
def test_scripts_with_arguments_are_not_what_a_folder_starts(
    others: dict[str, str], read: bool, tmp_path: Path
) -> None:
    for name, text in {**others, "results.sh": "cat log/$1/out\npython show.py --job $1"}.items():
        (tmp_path / name).write_text(text)
    if read:
        with pytest.raises(InputError, match=r"set LR|--line"):
            translate_source(Source(path=tmp_path), ENVIRON)
        return
    made, notes = translate_source(Source(path=tmp_path), ENVIRON)
    assert yaml.safe_load(made)["program"] == {"script": "t.py", "args": []}
    assert "not read, because they need arguments: results.sh" in notes


def test_jobs_of_a_folder_that_fit_no_count_are_asked_for(tmp_path: Path) -> None:
    for name, nodes in (("a.sh", 1), ("b.sh", 2)):
        text = f"#SBATCH -N {nodes}\nHOMOGENEOUS_CLUSTER=true\nsrun torchrun --nnodes 4 t.py\n"
        (tmp_path / name).write_text(text)
    with pytest.raises(
        InputError, match=r"counts 4 nodes.* choose one of the scripts: a\.sh, b\.sh"
    ):
        translate_source(Source(path=tmp_path), ENVIRON)


def test_no_option_no_key(tmp_path: Path) -> None:
    conf, notes = translate(tmp_path, "echo start\npython t.py\nls\n")
    assert conf == {"name": "t", "program": {"script": "t.py", "args": []}}
    assert "echo" not in notes and "not done" not in notes


def test_exported_variables_are_the_ranks(tmp_path: Path) -> None:
    text = "A=1\nexport B=2 PATH=/x:$PATH RUN=r-$SLURM_JOB_ID HF_TOKEN=hunter2\n"
    text += "export T=$TMPDIR/t\nC=3 python t.py\n"
    conf, notes = translate(tmp_path, f"#SBATCH -N 1\n{text}")
    assert conf["env"] == {"B": "2", "C": "3"} and conf["pass_env"] == ["HF_TOKEN"]
    assert conf["setup"] == ['export PATH="/x:$PATH"', 'export RUN=r-"${SLURM_JOB_ID}"',
                             'export T="${TMPDIR}"/t']  # fmt: skip
    assert "hunter2" not in notes + str(conf)


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


def test_a_pipe_is_no_script(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.sh")
    with pytest.raises(OSError, match="not a regular file"):
        translate_source(Source(path=tmp_path / "x.sh"), ENVIRON)


def test_a_variable_of_the_script_is_kept_if_the_users_shell_has_it_too(tmp_path: Path) -> None:
    """It was dropped in silence, and a job does not get the shell's variables."""
    (tmp_path / "x.sh").write_text("export A=1\nexport B=$B C=$C\npython t.py\n")
    made, _ = translate_source(
        Source(path=tmp_path / "x.sh"), {**ENVIRON, "A": "1", "B": "2", "D": "4"}
    )
    assert yaml.safe_load(made)["env"] == {"A": "1", "B": "2", "C": ""}


def test_a_path_set_around_an_inner_shell_reaches_the_program(tmp_path: Path) -> None:
    conf, _ = translate(tmp_path, "export PATH=/a/bin:$PATH\nsrun bash -c './run 1'\n")
    assert conf["setup"] == ['export PATH="/a/bin:$PATH"']
    line = "export PATH=/a/bin:$PATH\nsrun bash -c 'PATH=/b:$PATH ./run 1'\n"
    conf, _ = translate(tmp_path, line)
    assert conf["setup"] == ['export PATH="/b:/a/bin:$PATH"']


def test_the_name_of_this_machine_is_not_that_of_a_node(tmp_path: Path) -> None:
    """`$HOSTNAME` became the name of the machine on which the script was read."""
    text = "#SBATCH -N 2\nexport HEAD=$HOSTNAME\nsrun python t.py tcp://$HOSTNAME:2\n"
    conf, _ = translate(tmp_path, text)
    assert conf["env"] == {"HEAD": "${master.address}"}
    assert 'exec python t.py tcp://"$${MASTER_ADDR}":2' in conf["program"]["command"]


def test_each_component_of_a_het_job_has_its_own_words(tmp_path: Path) -> None:
    """`: --het-group=1 -n 1 ./run` became arguments of the program."""
    job = "#SBATCH -p a -N 1 -n 4\n#SBATCH hetjob\n#SBATCH -p b -N 1\n"
    conf, _ = translate(tmp_path, f"{job}srun --het-group=0 ./run 1 : --het-group=1 -n 2 ./run 1\n")
    assert conf["program"] == {"command": ["./run", "1"]}
    assert [group["ranks"] for group in conf["cluster"]["nodes"]] == [4, 2]
    said = refuse(tmp_path, f"{job}srun --het-group=0 ./a : --het-group=1 ./b\n")
    assert "leave only that one in a copy of the script" in said and "--line" not in said
    _, notes = translate(tmp_path, f"{job}srun ./run\n")
    assert "without --het-group srun starts it on the first component of the job only" in notes
    assert "programs that p.conf names" in refuse(tmp_path, "srun --multi-prog p.conf\n")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("python t.py", "without srun, so on the first node of the job only"),
        ("torchrun --nproc_per_node 4 t.py", "without srun, so on the first node of the job only"),
        ("srun torchrun --nproc_per_node 4 t.py", "each torchrun is a training of its own"),
        ("srun torchrun --nnodes 2 --nproc_per_node 4 t.py", ""),
        ("srun python t.py", ""),
        ("srun accelerate launch t.py", ""),
        ("deepspeed --hostfile hosts t.py", ""),
    ],
)
def test_a_launch_that_reaches_fewer_nodes_than_the_conf_is_told(
    line: str, said: str, tmp_path: Path
) -> None:
    _, notes = translate(tmp_path, f"#SBATCH -N 2 --gres=gpu:4 --ntasks-per-node=1\n{line}\n")
    assert said in notes and ("x.sh:2: " in notes.replace("hostfile", "")) >= bool(said)
    assert bool(said) == ("the conf starts" in notes)


@pytest.mark.parametrize(
    ("text", "python"),
    [
        ("python t.py", None),
        ("export A=1\nmkdir -p out\npython3 t.py", None),
        ("/env/bin/python t.py", "/env/bin/python"),
        ("env/bin/python t.py", "env/bin/python"),
        ("srun /env/bin/torchrun t.py", "/env/bin/python"),
        ("conda activate e\npython t.py", "python"),
        ("module load python\nsrun python3 -m pkg.t", "python3"),
        ("export PATH=/env/bin:$PATH\ntorchrun t.py", "python"),
        ("python3.12 t.py", "python3.12"),
        ("./t.py", None),
        ("conda activate e\naccelerate launch t.py", None),
    ],
)
def test_ranks_run_under_the_interpreter_of_the_script(
    text: str, python: str | None, tmp_path: Path
) -> None:
    """They would have run under the one that runs vjob."""
    conf, _ = translate(tmp_path, text)
    assert conf["program"].get("python") == python


QUIET = """\
#SBATCH --gres=gpu:1
#SBATCH --gres=gpu:2 --gpus=2
exec > train.log 2>&1
module load cuda || true
ulimit -n 4096 || echo no
mkdir -p /out || exit 1
sleep 10
nvidia-smi -pm 1
nvidia-smi -q -d MEMORY
find . -name '*.pyc' -delete
find . -name '*.pt'
deactivate
export CUDA_VISIBLE_DEVICES=$SLURM_LOCALID
srun -o $SLURM_JOB_ID.out -e $SLURM_PROCID.err python t.py $MORE
deactivate
echo 1 > after
"""


@pytest.mark.parametrize(
    ("text", "is_told"),
    [
        ("module load cuda\nmodule load nccl\npython t.py", True),
        ("set -e\nmodule load cuda\npython t.py", False),
        ("set -e\nset +e\nmodule load cuda\npython t.py", True),
        ("set -euo pipefail\nmodule load cuda\npython t.py", False),
        ("set -o errexit\nmodule load cuda\npython t.py", False),
        ("#!/bin/bash -le\nmodule load cuda\npython t.py", False),
        ("module load cuda || true\npython t.py", False),
        ("ulimit -n 65536\npython t.py", False),
    ],
)
def test_a_line_that_only_in_setup_ends_the_run_is_told(
    text: str, is_told: bool, tmp_path: Path
) -> None:
    """The script went on after a `module load` that failed, and the run ended."""
    conf, notes = translate(tmp_path, text)
    assert ("module load cuda (and 1 more): the script goes on" in notes) == ("nccl" in text)
    assert ("the script goes on if it fails; the run would end" in notes) == is_told
    if "ulimit" in text:
        assert conf["setup"] == ["ulimit -n 65536 || true"]


def test_lines_that_were_dropped_in_silence_are_told(tmp_path: Path) -> None:
    conf, told = translate(tmp_path, QUIET)
    assert conf["setup"] == [
        "module load cuda || true", "ulimit -n 4096 || true", "mkdir -p /out", "deactivate || true",
    ]  # fmt: skip
    for line, part in (
        (1, "--gres=gpu:1 is not used: x.sh:2 says gpu:2"),
        (3, "train.log is not written: all lines are in the run folder"),
        (7, "not done: sleep 10"),
        (8, "not done: nvidia-smi -pm 1; do it beforehand"),
        (10, "not done: find . -name '*.pyc' -delete"),
        (14, "CUDA_VISIBLE_DEVICES=${SLURM_LOCALID} is left out: each rank sees all GPUs"),
        (14, "${MORE} is not set, so no word stands for it"),
        (16, "after is not written: it follows the program"),
    ):
        assert f"x.sh:{line}: {part}" in told, (part, told)
    for absent in ("MEMORY", "*.pt", "--output", "--error", "--gpus", "deactivate"):
        assert absent not in told, told
    _, told = translate(tmp_path, "#!/bin/zsh\npython t.py\n")
    assert "x.sh:1: the script is for zsh, but bash read it" in told


def test_a_folder_that_only_the_job_knows_is_told(tmp_path: Path) -> None:
    """The working folder was one of the jail's, which is gone."""
    for line in ("python t.py", "srun bash -c 'python t.py'"):
        conf, notes = translate(tmp_path, f"cd $TMPDIR/a\n{line}\n")
        assert "workdir" not in conf and conf["program"]["script"] == "t.py"
        assert "x.sh:2: the script starts it in ${TMPDIR}/a, which only the job knows" in notes


def test_a_list_of_hosts_that_the_script_writes_is_counted(tmp_path: Path) -> None:
    text = "printf '%s slots=4\\n' a b c > hosts\ndeepspeed --hostfile=hosts t.py\n"
    conf, notes = translate(tmp_path, text)
    assert conf["cluster"]["nodes"] == [{"group": "master", "count": 3, "gpus": 4, "ranks": 4}]
    assert "hosts is not written" not in notes and "uses all GPUs" not in notes


def test_gpus_of_a_job_without_nodes_are_on_one_node(tmp_path: Path) -> None:
    head = "#SBATCH --gpus={}\n#SBATCH --ntasks-per-gpu=2\n#SBATCH --mem-per-gpu=32G\n"
    for gpus, count, is_spread in (("1", 1, False), ("4", 4, True)):
        made, notes = translate(tmp_path, head.format(gpus) + "srun python t.py\n")
        (group,) = made["cluster"]["nodes"]
        assert (group["gpus"], group["ranks"], group["memory_gb"]) == (count, 2 * count, 32 * count)
        assert ("may spread them over several" in notes) == is_spread
    made, notes = translate(
        tmp_path, "#SBATCH --gpus=8\nsrun torchrun --nnodes=2 --nproc_per_node=4 t.py\n"
    )
    (group,) = made["cluster"]["nodes"]
    assert (group["count"], group["gpus"]) == (2, 4) and "spread" not in notes


def test_the_folder_of_the_submit_is_the_scripts(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    for line, folder in (('cd "${SLURM_SUBMIT_DIR}" || exit 1', None),
                         ("cd $SLURM_SUBMIT_DIR/code", "code")):  # fmt: skip
        made, notes = translate(tmp_path, f"#SBATCH -N 1\n{line}\npython t.py\n")
        assert made.get("workdir") == folder and "SUBMIT_DIR" not in notes
    text = (
        "#SBATCH -N 1\nexport PYTHONPATH=$SLURM_SUBMIT_DIR\npython t.py --out $SLURM_SUBMIT_DIR/o\n"
    )
    made, notes = translate(tmp_path, text)
    assert made["program"]["args"] == ["--out", f"{tmp_path}/o"]
    assert made["setup"] == [f'export PYTHONPATH="{tmp_path}"']
    assert "x.sh:2: SLURM_SUBMIT_DIR is taken to be the script's folder" in notes


def test_what_a_kept_command_does_inside_is_not_noted(tmp_path: Path) -> None:
    text = 'srun apptainer exec a.sif bash -c "wandb login; python a.py; python b.py"\n'
    made, notes = translate(tmp_path, text)
    assert made["program"]["command"][-1] == "wandb login; python a.py; python b.py"
    assert "not done" not in notes


def test_a_folder_is_made_in_setup_whether_it_is_there_or_not(tmp_path: Path) -> None:
    made, notes = translate(tmp_path, "mkdir out\nmkdir -m 700 own\npython t.py\n")
    assert made["setup"] == ["mkdir -p out", "mkdir -p -m 700 own"] and "not done" not in notes


def test_proxies_are_unset_in_setup(tmp_path: Path) -> None:
    made, _ = translate(tmp_path, "unset http_proxy HTTP_PROXY own\npython t.py\n")
    assert made["setup"] == ["unset http_proxy", "unset HTTP_PROXY"]


def test_a_missing_argument_is_noted(tmp_path: Path) -> None:
    for text, is_noted in (
        ("DATA=$2\npython t.py $1 $DATA\n", True),
        ("f() {\n  echo $2\n}\npython t.py $1\n", False),
        ("python t.py $1 ${2:-none}\n", False),
        ("shift\npython t.py $1 $2\n", False),
    ):
        _, notes = translate(tmp_path, text, "out")
        assert ("x.sh: $2 was not given" in notes) == is_noted, text


def test_lines_that_sbatch_ignores_are_noted(tmp_path: Path) -> None:
    late = "OUT=logs\n#SBATCH -N 2\n#SBATCH -t 10\nmkdir -p $OUT/$SLURM_JOB_ID\npython t.py\n"
    made, notes = translate(tmp_path, late)
    assert "cluster" not in made
    assert "x.sh:2: sbatch ignores this #SBATCH line" in notes and "as it does 1 more" in notes
    assert made["setup"] == ['mkdir -p logs/"${SLURM_JOB_ID}"']
    written = "cat > j.sh <<E\n#SBATCH -N 2\nsrun python t.py\nE\nsbatch j.sh\n"
    assert "sbatch ignores this" not in translate(tmp_path, written)[1]


def test_short_options_of_srun_are_known_and_take_no_program(tmp_path: Path) -> None:
    for options in ("-l -u", "-K", "-K1 -v", "-q debug", "-Q"):
        made, notes = translate(tmp_path, f"#SBATCH -N 1\nsrun {options} python t.py --lr 1\n")
        assert made["program"] == {"script": "t.py", "args": ["--lr", "1"]}, options
        assert ("left out" in notes) == ("qos=debug is left out: use `qos` in cluster" in notes)


def test_an_agent_of_a_sweep_is_a_program(tmp_path: Path) -> None:
    made, _ = translate(tmp_path, "#SBATCH -N 1\nwandb login\nsrun wandb agent me/it/a1\n")
    assert made["program"] == {"command": ["wandb", "agent", "me/it/a1"]}


def test_options_of_srun_in_variables_are_noted(tmp_path: Path) -> None:
    text = "#SBATCH -N 1\nexport SLURM_CPU_BIND=cores\nsrun python t.py\n"
    _, notes = translate(tmp_path, text)
    assert "x.sh:2: SLURM_CPU_BIND=cores is left out: vjob gives srun its options" in notes

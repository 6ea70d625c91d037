"""Launches of a script are those that bash itself would start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vjob.jobs.errors import InputError
from vjob.shelf.importers.bash import passes, recording
from vjob.shelf.importers.bash.recording import Recording, read_script
from vjob.shelf.importers.bash.wrappers import locate_program

ENVIRON = {"HOME": "/home/kim", "USER": "kim", "DATA": "/corpus", "MY_TOKEN": "s3cr3t"}


def read(folder: Path, text: str, *args: str, **files: str) -> Recording:
    for name, content in files.items():
        (folder / name.replace("_sh", ".sh")).write_text(content)
    (folder / "x.sh").write_text(text)
    return read_script(folder / "x.sh", args=args, environ=ENVIRON)


def list_launches(found: Recording) -> list[str]:
    return [f"{launch.where} {' '.join(launch.texts)}" for launch in found.walk()]


@pytest.mark.parametrize(
    ("text", "launches"),
    [
        ("python train.py 'a b' $DATA", ["x.sh:1 python train.py a b /corpus"]),
        ("A=(1 2)\nfor i in ${A[@]}; do\n./run $i\ndone", ["x.sh:3 ./run 1", "x.sh:3 ./run 2"]),
        ("N=$((6000 + 4 / 2))\ntorchrun --master_port $N t.py", 
         ["x.sh:2 torchrun --master_port 6002 t.py"]),
        ("case $USER in kim) L=3;; *) L=4;; esac\npython t.py $L", ["x.sh:2 python t.py 3"]),
        ("[[ $USER == kim ]] && X=yes\npython t.py $X", ["x.sh:2 python t.py yes"]),
        ("f() {\n  python t.py $1\n}\nf 7", ["x.sh:2 python t.py 7"]),
        ("python t.py > logs/out.txt 2>&1 &", ["x.sh:1 python t.py"]),
        ("srun bash -c 'cd /w; python t.py $DATA'", ["x.sh:1 python t.py /corpus"]),
        ("srun bash <<E\npython t.py\nE", ["x.sh:2 python t.py"]),
        ("cat > job.sh <<E\npython t.py $USER\nE\nsbatch job.sh", ["job.sh:1 python t.py kim"]),
        ("bash other.sh 5", ["other.sh:2 python o.py 5"]),
        (". conf.sh\npython t.py $LR", ["x.sh:2 python t.py 0.1"]),
        ("module load cuda\npip install x\necho python t.py", []),
        ("exec python t.py\npython never.py", ["x.sh:1 python t.py"]),
        ("[[ ab =~ a(.) ]]\nX=1\npython t.py ${BASH_REMATCH[1]}", ["x.sh:3 python t.py b"]),
        ("P=/opt/x\n\"${P}/run\" 1", ["x.sh:2 /opt/x/run 1"]),
        ("cd a/../b\npython t.py $PWD/x", ["x.sh:2 python t.py {folder}/b/x"]),
        ("eval 'python t.py'", ["x.sh:1 python t.py"]),
        ("python t.py | tee log", ["x.sh:1 python t.py"]),
    ],
)  # fmt: skip
def test_launches_are_found_with_file_and_line(
    text: str, launches: list[str], tmp_path: Path
) -> None:
    found = read(tmp_path, text, other_sh="A=1\npython o.py $A$1".replace("$A", ""),
                 conf_sh="LR=0.1\n")  # fmt: skip
    assert list_launches(found) == [one.format(folder=tmp_path) for one in launches]


@pytest.mark.parametrize(
    ("text", "word", "unknown"),
    [
        ("python t.py --out run-$SLURM_JOB_ID", "run-${SLURM_JOB_ID}", {"${SLURM_JOB_ID}"}),
        ("python t.py --rank $SLURM_PROCID", "${SLURM_PROCID}", {"${SLURM_PROCID}"}),
        ("python t.py --addr $(hostname):29500", "${MASTER_ADDR}:29500", {"${MASTER_ADDR}"}),
        ("python t.py --lr $1", "$1", {"$1"}),
        ("python t.py --lr $LR", "${LR}", {"${LR}"}),
        ("python t.py --n $((SLURM_NNODES * 8))", "(a count of the job)", {"a count of the job"}),
        ("python t.py --n $SLURM_NNODES", "${SLURM_NNODES}", {"${SLURM_NNODES}"}),
        ("python t.py --master_port $(shuf -i 1-9)", "${MASTER_PORT}", {"${MASTER_PORT}"}),
        ("python t.py --x $(ls | head -1)", "$(ls)", {"$(ls)"}),
        ("python t.py --key $MY_TOKEN", "${MY_TOKEN}", {"${MY_TOKEN}"}),
    ],
)
def test_a_word_that_nobody_knows_before_the_job_is_open(
    text: str, word: str, unknown: set[str], tmp_path: Path
) -> None:
    found = read(tmp_path, f"#SBATCH --partition=q\n{text}\n")
    [launch] = found.walk()
    assert (launch.words[-1].text, launch.words[-1].unknown) == (word, unknown)
    assert bool(launch.words[-1].shell) is word.startswith(("run-", "${SLURM", "${MASTER"))


def test_what_may_be_left_out_is_not_asked_for(tmp_path: Path) -> None:
    found = read(tmp_path, 'python t.py --lr 1 a $EXTRA "$@"\n')
    assert list_launches(found) == ["x.sh:1 python t.py --lr 1 a"] and found.unset == []


def test_options_of_sbatch_are_read_with_their_lines(tmp_path: Path) -> None:
    found = read(tmp_path, "#SBATCH -N 2 --gres=gpu:4 # two\n#SBATCH hetjob\n#SBATCH -D/w\n")
    assert [(one.name, one.value, one.line, one.component) for one in found.options] == [
        ("nodes", "2", 1, 0), ("gres", "gpu:4", 1, 0), ("chdir", "/w", 3, 1)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ("python t.py", 1),
        ("echo a | awk '{print $1}'\npython t.py", 1),  # awk's own
        ("#SBATCH -N 2\npython t.py $SLURM_JOB_ID", 2),
        ("python t.py $SLURM_JOB_ID", 3),  # no job's script: another may set it
        ("python t.py $(hostname)", 2),
        ("#SBATCH -N 2\n. conf.sh\npython t.py $J", 2),
        ("python t.py $1", 2),
        ("python t.py $1 $(hostname)", 3),
    ],
)
def test_a_script_is_read_no_oftener_than_it_has_to_be(
    text: str, passes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    run = recording.run_pass

    def count(*args: Any, **given: Any) -> Any:
        seen.append(given)
        return run(*args, **given)

    monkeypatch.setattr(recording, "run_pass", count)
    read(tmp_path, text, conf_sh="J=$SLURM_JOB_ID")
    assert len(seen) == passes


@pytest.mark.parametrize(
    ("text", "words", "unset"),
    [
        ("OUT=$1\n[ -z \"$OUT\" ] && OUT=out\npython t.py --out $OUT", "--out out", []),
        ("OUT=$1\n[ \"$OUT\" ] || OUT=out\npython t.py --out=$OUT/a", "--out=out/a", []),
        ("[ -n \"$1\" ] && MORE=\"--lr $1\"\npython t.py --a $MORE", "--a", []),
        ("python t.py --yes $*", "--yes", []),
        ("python t.py --yes \"$@\"", "--yes", []),
        ("srun bash -c \"python t.py --yes $*\"", "--yes", []),
        ("python t.py --yes $1", "--yes $1", ["$1"]),
        ("cd $W\npython $PWD/t.py", "", ["${W}"]),
        ("python t.py --lr=$LR", "--lr=${LR}", ["${LR}"]),
        ("export RUN=\"python t.py --d $D/x\"\nsrun bash -c '$RUN'", "--d ${D}/x", ["${D}"]),
        ("export RUN=\"python t.py\"\nsrun bash -c '$RUN --h $SLURM_PROCID'",
         "--h ${SLURM_PROCID}", []),
        ("cat > j.sh <<E\npython t.py --lr $LR\nE\nsbatch j.sh", "--lr ${LR}", ["${LR}"]),
        ("srun bash -c '$RUN --a'", "--a", ["${RUN}"]),
        ("A=${D:-x}\npython t.py --d $D --a $A ${D-y}", "--d ${D} --a x y", ["${D}"]),
        ("C=$1\n[ -f \"$C\" ] || exit 1\nshift\npython t.py --c=$C $*", "--c=$1", ["$1"]),
        ("C=$1\n[ ! -f $C ] && exit 1\npython t.py -n $SLURM_NNODES --c $C",
         "-n ${SLURM_NNODES} --c $1", ["${SLURM_NNODES}", "$1"]),
        ("python t.py --d $SLURM_JOB_ACCOUNT/d", "--d ${SLURM_JOB_ACCOUNT}/d",
         ["${SLURM_JOB_ACCOUNT}"]),
        ("python t.py --d $LD_LIBRARY_PATH $VIRTUAL_ENV/d",
         "--d ${LD_LIBRARY_PATH} ${VIRTUAL_ENV}/d", []),
    ],
)  # fmt: skip
def test_what_nobody_gave_is_needed_only_where_nothing_stands_for_it(
    text: str, words: str, unset: list[str], tmp_path: Path
) -> None:
    found = read(tmp_path, text)
    [launch] = found.walk()
    assert " ".join(word.text for word in launch.program[2:]) == words or launch.program[0].unknown
    assert [name for one in found.walk_recordings() for name in one.unset] == unset


def test_a_folder_behind_a_link_is_the_scripts_own(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    found = read(tmp_path / "link", ". ./conf.sh\npython $PWD/t.py $LR", conf_sh="LR=0.1")
    assert list_launches(found) == [f"x.sh:2 python {tmp_path}/link/t.py 0.1"]


def test_a_pattern_for_files_that_are_not_here_is_no_word(tmp_path: Path) -> None:
    (tmp_path / "c.csv").touch()
    [launch] = read(tmp_path, "python t.py --a d/*.json --b '*.bias' --c *.csv").walk()
    assert [(word.text, word.shell) for word in launch.words if word.is_open] == [
        ("d/*.json", "d/*.json")
    ]
    assert launch.texts[-3:] == ["*.bias", "--c", "c.csv"]
    [launch] = read(tmp_path, "for one in d/*.json; do python t.py $one; done").walk()
    assert [(word.text, word.shell) for word in launch.words if word.is_open] == [("d/*.json", "")]


def test_a_shell_that_only_prepares_is_no_launch(tmp_path: Path) -> None:
    found = read(tmp_path, "srun bash -c 'cp /data/a /tmp'\nsrun ./run 1")
    assert list_launches(found) == ["x.sh:2 srun ./run 1"]
    assert [one.texts for one in found.setup] == [["cp", "/data/a", "/tmp"]]


@pytest.mark.parametrize("wrapper", [
    "nsys profile -c cudaProfilerApi", "nice --adjustment 5", "time --output took",
    "timeout --kill-after 5 60",
])  # fmt: skip
def test_the_value_of_a_wrappers_option_is_no_program(wrapper: str) -> None:
    words = wrapper.split()
    assert locate_program([*words, "python", "train.py"]) == len(words)


def test_all_passes_together_have_a_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "MOST_PROCESSOR_S", 0.0)
    asked: list[str] = []

    def count(*args: Any, name: str, **kwargs: Any) -> passes.Pass:
        asked.append(name)
        return passes.run_pass(*args, name=name, **kwargs)

    monkeypatch.setattr(recording, "run_pass", count)
    with pytest.raises(InputError, match=r"^the script was not read to its end: bash used"):
        read(tmp_path, "bash a.sh\nbash b.sh", a_sh="python t.py", b_sh="python t.py")
    assert asked == ["x.sh", "a.sh"]

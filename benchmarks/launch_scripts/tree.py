"""Compare `vjob init --from` with a training's own folder of scripts, word by word.

    python -m benchmarks.launch_scripts.tree FOLDER [--write]

FOLDER holds a `_00_conf.sh` with the job scripts around it, such as `Megatron-LM-2` of
AvatarHwang/FASOP; none of it is in this repository. Each of its models is tried on a uniform and on
a mixed cluster. The truth is that of a plain bash in which srun, sbatch, enroot and python are
stubs that hand on or record their words; vjob's own reader has no part in it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import RESULTS
from benchmarks.launch_scripts.judge import run_vjob
from benchmarks.machine import read_processor
from vjob.shelf.importers.compare import Difference, compare_words

PAGE = RESULTS / "script_tree.md"
HEAD = """\
Made by `python -m benchmarks.launch_scripts.tree FOLDER --write`, where FOLDER is the folder of
scripts of a patched Megatron-LM's users (`Megatron-LM-2` of AvatarHwang/FASOP), which is outside
this repository. The truth is what a plain bash starts of them, with stubs for sbatch, srun, enroot
and python: rank 0's program and its words. Beside it are the words of `vjob submit --dry-run` for
the conf that `vjob init --from FOLDER` makes, and the seconds of that, in a new process: on the
clock, while other programs ran, and of processor."""
MODEL = re.compile(r"^MODEL=(.*)$", re.MULTILINE)
KIND = re.compile(r"^HOMOGENEOUS_CLUSTER=\w+", re.MULTILINE)
CHOICE = re.compile(r"\$MODEL\"? ==? [\"'](\w+)[\"']")
STUBS = """\
sbatch() { bash "${@: -1}"; }
srun() {
  while [ $# -gt 0 ] && [ "$1" != bash ]; do shift; done
  "$@"
}
enroot() {
  [ "$1" = start ] || return 0
  while [ $# -gt 0 ] && [ "$1" != bash ]; do shift; done
  "$@"
}
nsys() { while [ $# -gt 0 ] && [ "$1" != python ]; do shift; done; "$@"; }
python() { printf '%s\\0' "$@" >>"$RECORD"; printf '\\n' >>"$RECORD"; }
scontrol() { echo node0; }
hostname() { echo node0; }
rm() { :; }; cp() { :; }; mkdir() { :; }; cd() { :; }
export -f sbatch srun enroot nsys python scontrol hostname rm cp mkdir cd
"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One model on one kind of cluster."""

    model: str
    cluster: str
    truth: Sequence[str]
    """Words after the program's name."""
    program: str
    conf: Sequence[str]
    nodes: str
    seconds: float
    processor_s: float = 0.0
    problem: str = ""

    @property
    def differences(self) -> list[Difference]:
        from vjob.shelf.importers.bash.recording import Word

        return compare_words([Word(word) for word in self.truth], self.conf)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", action="store_true", help="renew the page")
    options = parser.parse_args()
    rows = list(score_tree(options.folder))
    table = "\n".join(render_rows(rows))
    print(table)
    if options.write:
        PAGE.write_text(f"# A folder of scripts\n\n{HEAD}\n\n{table}\n\nOn {read_processor()}.\n")
    return int(any(row.problem or row.differences for row in rows))


def score_tree(folder: Path) -> Iterator[Row]:
    conf = (folder / "_00_conf.sh").read_text()
    for model in dict.fromkeys(CHOICE.findall(conf)):
        for cluster, flag in (("uniform", "true"), ("mixed", "false")):
            with tempfile.TemporaryDirectory() as place:
                tree = Path(place, "tree")
                tree.mkdir()
                for script in folder.glob("*.sh"):
                    (tree / script.name).write_text(script.read_text())
                text = MODEL.sub(f'MODEL="{model}"', conf)
                (tree / "_00_conf.sh").write_text(KIND.sub(f"HOMOGENEOUS_CLUSTER={flag}", text))
                yield score(tree, model, cluster)


def score(tree: Path, model: str, cluster: str) -> Row:
    program, *truth = record_words(tree)
    (tree / program).touch()
    began, used = time.perf_counter(), read_processor_s()
    made = run_vjob("init", "--from", ".", cwd=tree)
    seconds, processor_s = time.perf_counter() - began, read_processor_s() - used
    (tree / "conf.yaml").write_text(made.stdout)
    shown = run_vjob("submit", "conf.yaml", "--dry-run", "--json", cwd=tree)
    problem = made.stderr if made.returncode else shown.stderr if shown.returncode else ""
    plan = json.loads(shown.stdout)["plan"] if not problem else {"command": [], "groups": []}
    names = [Path(word).name for word in plan["command"]]
    conf = plan["command"][names.index(program) + 1 :] if program in names else []
    nodes = " + ".join(
        f"{group['count']} x {group['gpu_type']}:{group['gpus']}" for group in plan["groups"]
    )
    return Row(
        model=model, cluster=cluster, program=program, truth=truth, conf=conf, nodes=nodes,
        seconds=seconds, processor_s=processor_s, problem=problem.strip(),
    )  # fmt: skip


def read_processor_s() -> float:
    """Seconds of processor of all processes that this one started and that ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def record_words(tree: Path) -> list[str]:
    """The program that rank 0 starts and its words, as a bash with stubs records them."""
    with tempfile.TemporaryDirectory() as place:
        record, stubs = Path(place, "record"), Path(place, "stubs")
        stubs.write_text(STUBS)
        env = {"PATH": os.defpath, "HOME": place, "BASH_ENV": str(stubs), "RECORD": str(record),
               "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "node0"}  # fmt: skip
        copy = Path(place, "tree")
        copy.mkdir()
        for script in tree.glob("*.sh"):
            (copy / script.name).write_text(script.read_text())
        subprocess.run(
            ["bash", "_03_submit.sh"], cwd=copy, env=env, capture_output=True, timeout=60
        )
        first = record.read_text().splitlines()[0].split("\0")[:-1]
    place_of = next(i for i, word in enumerate(first) if word.endswith(".py"))
    return first[place_of:]


def render_rows(rows: Sequence[Row]) -> Iterator[str]:
    yield "| model | cluster | nodes | program | words | that differ | seconds | of processor |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        listed = row.problem.partition("\n")[0] or "; ".join(
            f"{one.change.value} {' '.join(one.script or one.conf)}" for one in row.differences
        )
        cells = (row.model, row.cluster, row.nodes, row.program, 1 + len(row.truth), listed or "0")
        yield "| " + " | ".join(map(str, cells)) + f" | {row.seconds:.2f} | {row.processor_s:.2f} |"


if __name__ == "__main__":
    sys.exit(main())

"""Files over the nodes' links: what vjob relies on holds, and a cut link cuts them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.cluster.lab import Lab
from tests.cluster.processes import wait_for

pytestmark = pytest.mark.slurm

TRY = """
import errno, json, os, sys
from pathlib import Path
folder, name = Path(sys.argv[1]), os.uname().nodename
(folder / f"{name}.part").write_text(name)
os.replace(folder / f"{name}.part", folder / name)
first = {}
for what, act in {
    "linked": lambda: os.link(folder / name, folder / "linked"),
    "created": lambda: os.close(os.open(folder / "created", os.O_CREAT | os.O_EXCL | os.O_WRONLY)),
    "made": lambda: os.mkdir(folder / "made"),
}.items():
    try:
        act()
        first[what] = True
    except FileExistsError:
        first[what] = False
(folder / f"{name}.json").write_text(json.dumps(first))
"""


def test_nodes_see_each_others_files_and_only_one_is_first(
    clean_lab: Lab, shared_files: Path
) -> None:
    (shared_files / "try.py").write_text(TRY)
    for node in ("a1", "b1"):
        words = ["srun", f"--nodelist={node}", "--nodes=1", "python3"]
        clean_lab.run([*words, str(shared_files / "try.py"), str(shared_files)])
    told = [json.loads((shared_files / f"{node}.json").read_text()) for node in ("a1", "b1")]
    assert told == [dict.fromkeys(("linked", "created", "made"), first) for first in (True, False)]
    seen = clean_lab.run(["srun", "--nodelist=b2", "cat", f"{shared_files}/linked"]).stdout
    assert seen == "a1"


def test_what_a_node_was_writing_lands_when_its_link_is_back(
    clean_lab: Lab, shared_files: Path
) -> None:
    loop = f"n=0; while sleep 0.1; do n=$((n + 1)); echo $n >{shared_files}/count; done"
    words = ["sbatch", "--parsable", "--nodelist=b1", "--no-requeue", "--output=/dev/null"]
    clean_lab.run([*words, f"--wrap={loop}"])
    count = shared_files / "count"

    def read() -> int:
        return int((count.exists() and count.read_text()) or 0)

    wait_for(lambda: read() > 5, 30, "the node writes")
    clean_lab.cut_link("b1")
    settled: list[int] = []

    def stands_still() -> bool:
        settled.append(read())
        return settled[-40:] == settled[-1:] * 40

    wait_for(stands_still, 30, "what the node writes stays on the node")
    clean_lab.restore_node("b1")
    wait_for(lambda: read() > settled[-1], 60, "the writer goes on, as over a hard mount")


def test_what_is_opened_is_as_new_as_it_was_closed(clean_lab: Lab, shared_files: Path) -> None:
    """A look at a name may be seconds old, as over NFS; what is read after an open is not."""
    word = shared_files / "word"
    word.write_text("one")
    look = f"cat {word}; echo"
    script = f"{look}; touch {shared_files}/looked; while ! [ -e {shared_files}/changed ]; do"
    script += f" sleep 0.05; done; {look}"
    job = ["sbatch", "--wait", "--nodelist=b1", f"--output={shared_files}/out", "--wrap", script]
    with subprocess.Popen(job, env={**os.environ, **clean_lab.env}) as waiting:
        wait_for((shared_files / "looked").exists, 30, "the node has looked")
        (shared_files / "new").write_text("another one")
        os.replace(shared_files / "new", word)
        (shared_files / "changed").touch()
        assert waiting.wait(60) == 0
    assert (shared_files / "out").read_text().splitlines() == ["one", "another one"]

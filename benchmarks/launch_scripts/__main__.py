"""Score `vjob init --from` on public launch scripts, which lie in a folder.

    python -m benchmarks.launch_scripts --list             what to fetch, and where to put it
    python -m benchmarks.launch_scripts FOLDER [--only NAME] [--write LABEL]
    python -m benchmarks.launch_scripts FOLDER --apart [--write LABEL]     the half kept apart
    python -m benchmarks.launch_scripts FOLDER --fresh [--write LABEL]     the second list: once

The scripts lie at FOLDER/OWNER+REPOSITORY/PATH. Of each it says whether program and words are
right, or an error is. An invented program, or a model that no line names, is the worst of answers.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from benchmarks import RESULTS
from benchmarks.launch_scripts import FRESH, LaunchScript, hash_blob, read_scripts, split_scripts
from benchmarks.launch_scripts.judge import Row, Verdict, score_script

PAGE = RESULTS / "launch_scripts.md"
KEPT = RESULTS / "launch_scripts.json"
HEAD = """\
Made by `python -m benchmarks.launch_scripts FOLDER --write LABEL` from 80 public scripts of 64
repositories, whose truth was written before the reader that they are for: 40, drawn by a seed, for
development; 40 apart, run once when the reader was done ("bash, apart"). After that run the causes
of its misses were mended, so that half is known since. A second list, "fresh", is of 19 other
repositories, a script of each drawn by a seed after the mending and before it was read: run once,
nothing was changed for it. The scripts lie outside this repository; `--list` prints what to fetch.

A row is right if the conf has the script's program and each of its words, but for those that only
the user or the job knows; or if it is refused, and the list says why that is right. In the columns
"before", "bash" and "bash, apart" a refusal counted by its exit code; since then the reason of the
list has to be among those that the importer gives. `nodes, ranks` tells whether both counts are
those of the script, where it has them. Other programs used the machine while the seconds were
measured.

The miss of the fresh list, ProLong, gives an option a variable in quotation marks that nobody sets.
Bash passes an empty word; the importer asks for the variable. That of the half apart, nvlm, has a
folder to be replaced in its words, and is refused for it; axolotl and pai-mpi are refused for
another reason, which is true too.

A third draw of 24 scripts, one of each of 24 other repositories, judged by eye, was run once before
"tested files": 21 were right or refused, one had a wrong program (FZJ-JSC/tutorial-multi-gpu) and
two had other words (CSCfi/llm-fine-tuning-examples, which tests whether the file of its argument is
there, and detectron2, which goes over files that are not here). All three
are refused now. The others: microsoft/Megatron-DeepSpeed, unilm, icefall, wenet, openfold,
OpenNMT-py, LAVIS, FastChat, TinyLlama, open_flamingo, speechbrain, alignment-handbook, diffusers,
torchtune, pytorch/benchmark, CSCfi/pytorch-ddp-examples, mistral, llm-jp-sft, mlcommons' results
v3.1, TransformerEngine, Princeton's multi_gpu_training."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "folder", nargs="?", type=Path, default=os.environ.get("VJOB_BENCH_SCRIPTS")
    )
    parser.add_argument("--list", action="store_true", help="repository, commit, path, place")
    parser.add_argument("--apart", action="store_true", help="the half kept apart")
    parser.add_argument("--fresh", action="store_true", help="the second list: once")
    parser.add_argument("--only", metavar="NAME", help="one script of this half")
    parser.add_argument("--write", metavar="LABEL", help="keep the rows, renew the page")
    options = parser.parse_args()
    if options.list:
        print("\n".join(list_files([*read_scripts(), *read_scripts(FRESH)])))
        return 0
    if options.folder is None:
        parser.error("name the folder of the scripts; --list prints what belongs there")
    if options.write and options.only:
        parser.error("--write keeps a whole half")
    scripts = read_scripts(FRESH) if options.fresh else split_scripts(read_scripts())[options.apart]
    scripts = [one for one in scripts if options.only in (None, one.name)]
    if not scripts:
        parser.error(f"{options.only} is not in this half")
    if problem := find_missing(scripts, Path(options.folder)):
        parser.error(problem)
    rows = [score_script(one, Path(options.folder)) for one in scripts]
    print("\n".join(render_rows(rows)), *count_rows(rows).items(), sep="\n")
    if options.write:
        half = ", apart" if options.apart else ", fresh" if options.fresh else ""
        keep(options.write + half, rows)
    return int(any(row.verdict is Verdict.INVENTED for row in rows))


def list_files(scripts: Sequence[LaunchScript]) -> Iterator[str]:
    """Each file once, with its repository, commit, path, and place below the folder."""
    for one in scripts:
        for path in (one.path, *one.beside):
            yield f"{one.repository}\t{one.commit}\t{path}\t{one.locate(Path(), path)}"


def find_missing(scripts: Sequence[LaunchScript], folder: Path) -> str | None:
    """The first file that is not there, or is not that of the list."""
    for one in scripts:
        for file in (one.locate(folder, path) for path in (one.path, *one.beside)):
            if not file.is_file():
                return f"{file} is not there: see --list"
        if hash_blob(one.locate(folder).read_bytes()) != one.blob:
            return f"{one.locate(folder)} is not that of commit {one.commit}"
    return None


def render_rows(rows: Sequence[Row]) -> Iterator[str]:
    yield "| script | verdict | nodes, ranks | notes | said |"
    yield "|---|---|---|---|---|"
    for row in rows:
        yield f"| {row.name} | {row.verdict.value} | {row.counts} | {row.notes} | {row.said} |"


def count_rows(rows: Sequence[Row]) -> dict[str, str]:
    """The figures of the page's first table."""
    found = Counter(row.verdict for row in rows)
    counts = Counter(row.counts for row in rows)
    notes, seconds = ([getattr(row, name) for row in rows] for name in ("notes", "seconds"))
    return {
        "right": f"{found[Verdict.RIGHT] + found[Verdict.REFUSED]} of {len(rows)}",
        **{verdict.value: str(found[verdict]) for verdict in Verdict},
        "nodes and ranks right": f"{counts['right']} of {counts['right'] + counts['wrong']}",
        "notes, median and most": f"{median(notes):.0f}, {max(notes)}",
        "seconds, median and most": f"{median(seconds):.2f}, {max(seconds):.2f}",
    }


def keep(label: str, rows: Sequence[Row]) -> None:
    """Keep the figures under `label`, and write the page: those of all labels, then these rows."""
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    kept[label] = count_rows(rows)
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    lines = ["# Public launch scripts", "", HEAD, "", "| scripts | " + " | ".join(kept) + " |"]
    lines.append("|---" * (1 + len(kept)) + "|")
    for what in kept[label]:
        lines.append(f"| {what} | " + " | ".join(one.get(what, "") for one in kept.values()) + " |")
    text = PAGE.read_text() if PAGE.exists() else ""
    others = [part for part in text.split("\n## ")[1:]
              if find_half(part.partition("\n")[0]) != find_half(label)]  # fmt: skip
    lines += ["", f"## {label}", *render_rows(rows)]
    PAGE.write_text("\n".join(lines) + "".join(f"\n\n## {part.rstrip()}" for part in others) + "\n")


def find_half(label: str) -> str:
    """The list that a label is of: the page has the last rows of each."""
    return label.partition(", ")[2]


if __name__ == "__main__":
    sys.exit(main())

"""Command line of the launcher: the flags of Varuna's run_varuna.

python -m varuna_core.launch [options] SCRIPT [ARGUMENT...]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vjob.jobs.errors import VjobError
from vjob.shelf.launcher.runs import find_launched, kill_run, resume_run, start_run
from vjob.shelf.launcher.translate import Arguments

_DESCRIPTION = """\
Train in stages and replicas on a list of machines, over ssh or on this one alone.

  echo 127.0.0.1 > machines
  python -m varuna_core.launch --machine_list machines --gpus_per_node 4 \\
      --nstages 2 --chunk_size 4 --batch_size 64 train.py --lr 1e-4

starts four ranks of train.py here: two replicas of two stages. Every machine needs a login over ssh
without a password, the same code_dir, python and run folder (a shared file system). The run is one
like those of `vjob submit`: `vjob status`, `logs`, `stacks`, `cancel`, `report` know it. Ctrl-C
ends it, saving first where ranks can; twice, SIGTERM and --kill end it at once; SIGUSR1 reaches its
ranks. A launcher that is killed, or whose terminal is closed, leaves it running.

Each rank runs in code_dir:
  python -u train.py --rank=R --local_rank=L --stage_to_rank_map=0,2;1,3; --chunk_size=4 \\
      --batch-size=32 --lr 1e-4
where --batch-size is its replica's share, and finds RANK, WORLD_SIZE, MASTER_ADDR and the like.
"""

_EPILOG = """\
files: log/<script>-<time>/ has conf.yaml, plan.json, scheduler.out, and attempt-N/ with <node>.out
and .err, where each line has its rank before it, and state/outcome.json.

exit codes: 0 all ranks exited 0; 2 wrong input; 112 a machine is not ready; 113 one was lost;
130 and 143 ended by Ctrl-C, and by SIGTERM or --kill; else that of the rank that failed first.
"""

_DEFAULT_ENV = "varuna.env"


def main(words: Sequence[str] | None = None) -> int:
    """The exit code."""
    _open_outputs()
    given = vars(build_parser().parse_args(words))
    try:
        return _run(given)
    except VjobError as error:
        print(f"launch: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("launch: interrupted", file=sys.stderr)
        return 130
    except OSError as error:  # a full or vanished disk
        name = f" {error.filename}" if error.filename else ""
        print(f"launch: cannot go on:{name}: {error.strerror}", file=sys.stderr)
        return VjobError.exit_code
    finally:
        _flush_outputs()


def _open_outputs() -> None:
    """Open outputs that the launcher was started without: the run needs none of them."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def _flush_outputs() -> None:
    """Flush outputs at the end; what a closed terminal did not take is in the files."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            # The interpreter flushes once more at its exit, and would exit with 120.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m varuna_core.launch",
        usage="%(prog)s [options] --nstages P --chunk_size C --batch_size B SCRIPT [ARGUMENT...]\n"
        "       %(prog)s --kill | --resume [options]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    where = parser.add_argument_group("where")
    where.add_argument(
        "--machine_list",
        metavar="FILE",
        help="a machine a line: HOST, USER@HOST or USER@HOST:PORT; 127.0.0.1 or localhost is this "
        "machine, without ssh; # begins a comment (default: available_machines.out)",
    )
    where.add_argument("--gpus_per_node", type=int, metavar="N", help="ranks a machine (default 4)")
    where.add_argument("--cpu", action="store_true", default=None, help="ranks without GPUs")
    where.add_argument(
        "--manager_ip",
        metavar="IP",
        help="this machine's address as the others reach it, where it is first in the list "
        "(default: by its name and routes); with --no_morphing only",
    )
    where.add_argument(
        "--ssh_config", metavar="FILE", help="for ssh -F (default: ssh's own, ~/.ssh/config)"
    )
    how = parser.add_argument_group("how")
    how.add_argument("--nstages", type=int, metavar="P", help="stages of the pipeline")
    how.add_argument("--chunk_size", type=int, metavar="C", help="samples of a micro-batch")
    how.add_argument(
        "--profile",
        metavar="PATH",
        help="what was measured of the model (`vjob profile`, varuna_core.Profiler), or the folder "
        "of one such file: --nstages and --chunk_size may be left out then, and the fastest are "
        "taken",
    )
    how.add_argument(
        "--batch_size",
        "--batch-size",
        type=int,
        metavar="B",
        help="samples of a step over all replicas, which must divide it",
    )
    how.add_argument(
        "--no_morphing",
        action="store_true",
        default=None,
        help="keep the machines to the end; without it the list is watched, and the run continues "
        "on the machines that are there",
    )
    what = parser.add_argument_group("what")
    what.add_argument(
        "--code_dir", metavar="DIR", help="where ranks run, the same path everywhere (default: .)"
    )
    what.add_argument(
        "--python", metavar="PATH", help="of the ranks (default: the one that runs this)"
    )
    what.add_argument(
        "--no_arguments",
        action="store_true",
        default=None,
        help="give the script its own arguments alone: it reads RANK and the like, or leaves "
        "Varuna's arguments out",
    )
    what.add_argument(
        "--env_file",
        metavar="FILE",
        help="NAME=VALUE words, all lines, with a shell's quotes; nothing of the shell around "
        f"the launcher reaches a rank otherwise (default: {_DEFAULT_ENV}, if it is there)",
    )
    what.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGUMENT...]", help="what to train"
    )
    runs = parser.add_argument_group("runs")
    runs.add_argument(
        "--log_folder", metavar="DIR", help="of all runs, on a shared disk (default: CODE_DIR/log)"
    )
    runs.add_argument(
        "--run", metavar="RUN", help="which run to --kill or --resume (default: the newest)"
    )
    either = runs.add_mutually_exclusive_group()
    either.add_argument("--kill", action="store_true", help="end a live run, from any terminal")
    either.add_argument(
        "--resume",
        action="store_true",
        help="start a run once more, in a new folder, with its old arguments where no others are "
        "given",
    )
    return parser


def _run(given: dict[str, Any]) -> int:
    kill, resume = given.pop("kill"), given.pop("resume")
    named, log_folder = given.pop("run"), given.pop("log_folder")
    asked = {name: value for name, value in given.items() if value not in (None, [])}
    for name in ("machine_list", "code_dir", "env_file", "ssh_config", "profile"):
        if name in asked:
            asked[name] = os.path.abspath(asked[name])
    if os.sep in asked.get("python", ""):
        asked["python"] = os.path.abspath(asked["python"])
    if asked.get("command", [""])[0] == "--":
        del asked["command"][0]
    folder = Path(log_folder or os.path.join(asked.get("code_dir", "."), "log")).absolute()
    if kill:
        return kill_run(find_launched(folder, named, live=True))
    if resume:
        return resume_run(find_launched(folder, named, live=False), asked)
    return start_run(Arguments(**{**_defaults(), **asked}), folder)


def _defaults() -> dict[str, Any]:
    env_file = os.path.abspath(_DEFAULT_ENV)
    return {
        "machine_list": os.path.abspath("available_machines.out"),
        "gpus_per_node": 4,
        "nstages": None,
        "chunk_size": None,
        "batch_size": None,
        "manager_ip": None,
        "no_morphing": False,
        "code_dir": os.getcwd(),
        "env_file": env_file if os.path.exists(env_file) else None,
        "python": sys.executable,
        "ssh_config": None,
        "cpu": False,
        "profile": None,
        "no_arguments": False,
        "command": [],
    }

"""`python -m varuna_core.programs.pretrain training.json`: one rank of a built-in program.

`vjob submit` writes the file for a conf with `program: pretrain_gpt` or `pretrain_bert` and starts
the ranks; the program also runs under torchrun or as a single process. With `--profile FILE`, which
`vjob profile` passes, the rank measures the model's costs and does not train. With `--fork` it
imports, and forks the ranks of a node (varuna_core/agent/setup/forked_ranks.py); with `--standby`
it also waits between the two.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from varuna_core.records.training import Training


def run() -> NoReturn:
    """Run `main` and the registered exit handlers, then exit without the interpreter's teardown.

    The interpreter would tear torch down object by object: half a second of processor time during
    which the end of this rank would stay unnoticed.
    """
    code = 1  # of an error that nobody caught

    def end() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)

    atexit.register(end)  # the first one is the last that is called
    gc.disable()  # until the model is built: there is no garbage among what is imported
    try:
        sys.exit(main())
    except SystemExit as exit:  # also of ranks that were asked to save and leave
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
        raise


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; return 1, after one line, if the settings or the data are at fault."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        wanted = _parse(words)
    except SystemExit as end:  # argparse has said why
        return int(end.code or 0)
    _spare_compiler(wanted.training)
    if wanted.fork or wanted.standby:
        from varuna_core.programs.forking import fork_ranks

        return main(fork_ranks(is_early=wanted.standby))
    if wanted.profile is not None:
        # torch 2.13 warns of memory from before each look at it.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        import torch  # noqa: F401 # said here, not in a traceback
    except ModuleNotFoundError as error:
        print(
            f"pretrain: {error} in {sys.executable}: run its pip install '.[train]' in vjob's "
            "checkout, or set container.image to an image that has the module",
            file=sys.stderr,
        )
        return 1
    from varuna_core.checkpoint.format.errors import CheckpointError
    from varuna_core.data.errors import DataError
    from varuna_core.planner.profile.errors import PlanningError
    from varuna_core.programs.place import ProgramError

    try:
        if wanted.profile is None:
            _train(wanted.training)
        else:
            _profile(wanted)
    except (DataError, ProgramError, CheckpointError, PlanningError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _parse(words: Sequence[str]) -> argparse.Namespace:
    def read_numbers(text: str) -> list[int]:
        return [int(word) for word in text.split(",")]

    parser = argparse.ArgumentParser(prog="python -m varuna_core.programs.pretrain")
    parser.add_argument("training", type=Path, metavar="training.json")
    parser.add_argument("--standby", action="store_true", help="like --fork, but import in advance")
    parser.add_argument("--fork", action="store_true", help="fork the ranks that stdin describes")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="measure instead of training")
    parser.add_argument("--sizes", type=read_numbers, metavar="1,2,..", help="micro-batches")
    parser.add_argument("--tensor", type=read_numbers, metavar="1,2,..", help="tensor degrees")
    return parser.parse_args(words)


def _spare_compiler(path: Path) -> None:
    """Keep torch's compiler out unless compiled blocks or torchao (fp8) need it; errors in the file
    are reported later."""
    from varuna_core.programs.dynamo import spare_dynamo
    from varuna_core.records.training import read_training

    with contextlib.suppress(ValueError):
        training = read_training(path)
        if not training.compile and training.precision != "fp8":
            spare_dynamo()


def _read(path: Path) -> Training:
    from varuna_core.programs.place import ProgramError
    from varuna_core.records.training import read_training

    try:
        return read_training(path)
    except ValueError as error:
        raise ProgramError(str(error)) from None


def _profile(wanted: argparse.Namespace) -> None:
    from varuna_core.programs.place import compute_place, join, leave
    from varuna_core.programs.profiling import profile_training

    training = _read(wanted.training)
    place = compute_place(training.pipeline, training.tensor)
    join(place)
    copy = wanted.training.with_name("profile.json")
    gc.enable()
    profile_training(
        training, place, wanted.profile, copy, sizes=wanted.sizes, degrees=wanted.tensor
    )
    leave()


def _train(path: Path) -> None:
    from varuna_core.programs.place import compute_place, join, leave
    from varuna_core.programs.training import Trainer, open_trace
    from varuna_core.records.logs.trace import choose_trace_file
    from varuna_core.runtime.saving.preemption import ignore_calls

    training = _read(path)
    place = compute_place(training.pipeline, training.tensor)
    trace = None
    if os.environ.get("VJOB_TRACE") and training.timeline:
        trace = open_trace(training, place, choose_trace_file(os.environ))
    join(place)
    trainer = Trainer(training, place, trace)
    gc.freeze()  # what is there stays: torch's own objects are never looked through
    gc.enable()
    trainer.run()
    ignore_calls()  # all is saved
    trainer.close()
    leave()


if __name__ == "__main__":
    run()

"""`python -m varuna_core.pretrain training.json`: one rank of a built-in program.

`vjob submit` makes the file of a conf with `program: pretrain_gpt` or `pretrain_bert` and starts
the ranks; under torchrun, or alone, it runs as well.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Train; 1 and one line where the settings or the data are at fault."""
    words = sys.argv[1:] if arguments is None else arguments
    if len(words) != 1 or words[0].startswith("-"):
        print("usage: python -m varuna_core.pretrain training.json", file=sys.stderr)
        return 2
    logging.basicConfig(format="%(levelname)s: %(message)s")
    # torch 2.13 warns of its own class when the structure of a message is unpickled.
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
    try:
        import torch  # noqa: F401 # said here, not in a traceback
    except ModuleNotFoundError as error:
        print(
            f"pretrain: {error} for {sys.executable}: pip install 'vjob[train]' there, or set "
            "container.image to an image that has it",
            file=sys.stderr,
        )
        return 1
    from varuna_core.checkpoint.errors import CheckpointError
    from varuna_core.data.errors import DataError
    from varuna_core.programs.errors import ProgramError

    try:
        _train(Path(words[0]))
    except (DataError, ProgramError, CheckpointError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _train(path: Path) -> None:
    from varuna_core.preemption import ignore_calls
    from varuna_core.programs.errors import ProgramError
    from varuna_core.programs.place import find_place, join, leave
    from varuna_core.programs.training import Trainer, open_trace
    from varuna_core.records.training import read_training

    try:
        training = read_training(path)
    except ValueError as error:
        raise ProgramError(str(error)) from None
    place = find_place(training.pipeline, training.tensor)
    trace_path = os.environ.get("VJOB_TRACE")
    trace = None
    if trace_path and training.timeline:
        trace = open_trace(training, place, Path(trace_path))
    join(place)
    trainer = Trainer(training, place, trace)
    trainer.run()
    ignore_calls()  # all is saved
    trainer.close()
    leave()


if __name__ == "__main__":
    sys.exit(main())

"""state/partition.json of an attempt: the partition that Varuna chose for a script's model, since
neither its conf nor the script gave one. Rank 0 writes it once."""

from __future__ import annotations

from typing import Any, Mapping, Optional

from varuna_core.facts.partition import Partition
from varuna_core.records.files import write_json
from varuna_core.records.runfolder import AttemptFolder


def write_partition(attempt: AttemptFolder, partition: Partition) -> None:
    write_json(attempt.partition, {"partition": partition.spell()}, lasts=False)


def parse_partition(value: Any) -> Optional[Partition]:
    """Parse the content of the file, with every segment counted; None for anything else."""
    text = value.get("partition") if isinstance(value, Mapping) else None
    return Partition.find(text) if isinstance(text, str) else None

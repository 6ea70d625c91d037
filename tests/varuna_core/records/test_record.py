"""record.json of older and newer versions of vjob."""

from __future__ import annotations

import json
from pathlib import Path

from tests.jobs.elastic.test_membership import make_record
from varuna_core.records.record import ArrayPlace, JobRecord, read_record, write_record
from varuna_core.records.runfolder import RunFolder

LATER = ("after", "after_any", "sweep", "swept", "array", "code")
"""Fields that the first records did not have."""


def test_records_of_older_and_newer_versions_are_read(tmp_path: Path) -> None:
    """A `vjob watch` that goes on through an upgrade reads what the new version writes."""
    run = RunFolder(tmp_path)
    record = make_record(run, (JobRecord(id="1", group=None),))
    write_record(run, record)
    written = json.loads(run.record.read_text())
    old = {name: value for name, value in written.items() if name not in LATER}
    run.record.write_text(json.dumps(old))
    assert read_record(run) == record
    run.record.write_text(json.dumps({**written, "moon": "full", "array": None}))
    assert read_record(run) == record


def test_an_element_of_an_array_knows_its_place(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    record = make_record(run, (JobRecord(id="4_2", group=None),))
    placed = type(record)(**{**vars(record), "array": ArrayPlace(name="six", index=2)})
    write_record(run, placed)
    assert read_record(run) == placed

"""Two commits on the same inputs: every text and JSON document that differs, against an allow-list.

    python -m benchmarks.same --before COMMIT [--after COMMIT]

    inputs.py       confs of the examples and tests; run folders, made once by the earlier commit
    collect.py      one checkout's scripts, resolved confs, plans, records and JSON documents
    difference.py   JSON paths and lines that differ, and those that allowed.yaml allows
    clock/          a sitecustomize with a clock that stands still

Clock, user, host and paths are the same for both, so nothing has to be guessed away.
"""

"""The data that readers make, rules judge and screens show: `Snapshot` and `Verdict`."""

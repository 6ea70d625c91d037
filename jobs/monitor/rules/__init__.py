"""From a `Snapshot` to a `Verdict`: `judge.judge` asks each rule in order. Pure."""

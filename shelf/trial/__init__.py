"""`vjob try`: two steps of the user's own program on one node, before the whole run is submitted.

`run.run_trial` makes the conf small (`smaller.shrink`), submits it as any run, watches it
(`watch.watch`), judges it (`judgement.judge_try`) and returns a `result.Result`, whose rows are
made in `rows`.
"""

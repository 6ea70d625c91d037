"""`vjob try`: two steps of the user's own program on one node, before the whole run is submitted.

`run.Try` makes the conf small (`smaller.shrink`), submits it as any run, watches it
(`watch.watch`), and returns a `result.Result`, which `judgement` fills.
"""

"""`vjob try`: two steps of the user's own program on one node, before the whole run is submitted.

`trial.run_trial` makes the conf small (`smaller.shrink`), submits it as any run, watches it
(`watching.Watcher`), judges what was seen (`judgement.find_trouble`), asks what the whole run will
take (`outlook.find_outlook`) and returns a `result.Result`.
"""

"""Run a Python function as a run's program: every rank unpickles and calls it, and pickles what it
returned or raised.

`runner.main` is the entry point of `function.pyz`, `environment.VjobJobEnvironment` is what
`submitit.JobEnvironment()` returns in a rank, `facts.write_facts` records the Python that submits.
Imports the records; submitit and cloudpickle only in `environment` and where a pickle is written.

facts, pickles <- environment <- runner
"""

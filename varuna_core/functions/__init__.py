"""A Python function as a run's program: every rank unpickles it, calls it, and pickles what it
returned or raised.

`runner.main` is the entry of `function.pyz`, `environment.VjobJobEnvironment` what
`submitit.JobEnvironment()` gives in a rank, `facts.write_facts` what a submit says of itself.
Imports the records; submitit and cloudpickle only in `environment` and where a pickle is written.

facts, pickles <- environment <- runner
"""

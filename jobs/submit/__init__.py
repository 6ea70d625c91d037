"""Turn a resolved conf into a plan, scripts and a job: `submit.prepare` builds them,
`submit.submit` submits them, in an order that loses no job.

Imports the conf, planning, programs, containers, images, schedulers, runs and the agent's bundle.
"""

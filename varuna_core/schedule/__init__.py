"""Build, verify and simulate pipeline schedules, which are lists of actions, without torch.

`registry.SCHEDULES` lists the schedules and `registry.build_schedule` builds one, `verify.verify`
checks that the engine may run a schedule, `compiled.simulate` computes its times;
docs/schedule_design.md has drawings. To add a schedule, write a function and register it. Imports
the standard library and records only.

actions <- held, order, costs <- recompute, compiled <- fuse, generators <- zero_bubble <- registry
"""

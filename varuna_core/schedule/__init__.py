"""Make, verify and time pipeline schedules, which are lists of actions, without torch.

`registry.SCHEDULES` names the schedules and `registry.build_schedule` makes one, `verify.verify`
accepts what the engine may run, `compiled.simulate` times a schedule; docs/schedule_design.md draws
them. A new schedule is a function and a row in the registry. Imports the standard library and
records only.

actions <- held, order, costs <- recompute, compiled <- fuse, generators <- zero_bubble <- registry
"""

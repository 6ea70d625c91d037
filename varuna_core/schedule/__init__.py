"""Pipeline schedules: lists of actions, made, verified and timed without torch.

`registry.SCHEDULES` names them and `registry.build_schedule` makes one, `verify.verify` accepts
what the engine may run, `compiled.simulate` times it; docs/schedule_design.md draws them. A new
schedule is a function and a row in the registry. Standard library only; of our rooms it imports
records.

actions <- held, order, costs <- recompute, compiled <- fuse, generators <- zero_bubble <- registry
"""

"""Pipeline schedules: lists of actions, made, verified and timed without torch.

docs/runtime.md draws them; the engine runs any list that `verify` accepts.
"""

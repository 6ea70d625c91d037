"""Split a model with CutPoints into the modules of its stages.

`cut.CutPoint` marks a model, `split.split_model` runs it dry and divides it, `Split.make_stage`
makes a stage. Imports comm.values, and the spelling of partitions (records).
"""

"""From a model with CutPoints to the module of each stage.

`cut.CutPoint` marks a model, `split.split_model` runs it dry and shares it out, `Split.make_stage`
makes a stage. Imports comm.values, and how partitions are written (records).
"""

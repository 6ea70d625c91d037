"""Split a model with CutPoints into the modules of its stages.

`cut.CutPoint` marks a cut in a model, `split.split_model` divides the model after a dry run,
`Split.make_stage` builds a stage. Imports comm.values, and the spelling of partitions (records).
"""

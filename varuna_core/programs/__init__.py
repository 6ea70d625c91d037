"""The built-in programs: GPT and BERT models, and the training that runs them.

`pretrain.main` is the entry point, and `training.Trainer` runs one rank's training. Imports Varuna
and its runtime, the profiler, the data and the records.

layers <- gpt, bert <- building <- training, profiling <- pretrain        place <- batches, lines
"""

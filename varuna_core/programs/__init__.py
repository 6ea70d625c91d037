"""The built-in programs: GPT and BERT models, and the training that runs them.

`pretrain.main` is their entry, `training.Trainer` one rank's training. Imports everything in
varuna_core but the agent, launch and morph.

layers <- gpt, bert <- transformers_names        place <- batches, lines <- training <- pretrain
"""

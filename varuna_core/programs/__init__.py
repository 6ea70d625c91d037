"""The built-in programs: GPT and BERT models, and the training that runs them.

layers <- gpt, bert <- transformers_names        batches, learning_rate, lines <- training
"""

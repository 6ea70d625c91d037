"""Others' files: of Hugging Face and Megatron-LM both ways, and Varuna's, read.

`weight_files.open_weights` reads a folder lazily for `Options(state_dict=...)`; `huggingface`,
`megatron` and `varuna` make our checkpoints of theirs, and all but the last the other way.
`transformers_names` renames weights in memory. `pickles` and `distcp` read what others pickled, and
nothing of it runs. Imports `checkpoint.store` and `format`.
"""

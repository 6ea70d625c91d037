"""Import and export checkpoints of Hugging Face, Megatron-LM and torch.distributed.checkpoint.

`weight_files.open_weights` reads a folder lazily for `Options(state_dict=...)`; `huggingface`,
`megatron` and `torch_dcp` convert between these formats and ours. `pickles` and `distcp` read other
programs' pickles without running any code in these. Imports `checkpoint.store` and `format`.
"""

"""Others' files: Hugging Face's folders of weights, both ways.

`weight_files.open_weights` reads a folder lazily for `Varuna(state_dict=...)`; `huggingface` makes
our checkpoints of such folders, and folders of checkpoints. Imports `checkpoint.store` and
`format`.
"""

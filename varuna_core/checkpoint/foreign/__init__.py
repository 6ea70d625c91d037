"""Others' files: Hugging Face's folders of weights, both ways, and Varuna's checkpoints, read.

`weight_files.open_weights` reads a folder lazily for `Varuna(state_dict=...)`; `huggingface` and
`varuna` make our checkpoints of theirs, and the former the other way. Imports `checkpoint.store`
and `format`.
"""

"""Read and write the files of a checkpoint: tensor files and manifest, with boxes of tensors.

`manifest.read_manifest`, `tensorfile.read_head`, `entries.write_file`. Imports `records.files`;
only `entries` and `plain` need torch.
"""

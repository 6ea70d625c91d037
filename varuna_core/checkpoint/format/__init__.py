"""The files of a checkpoint: boxes of tensors, tensor files, manifest. No folder, no process group.

`manifest.read_manifest`, `tensorfile.read_head`, `entries.write_file`. Imports `records.files`;
only `entries` and `plain` need torch.
"""

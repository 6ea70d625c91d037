"""What a checkpoint is made of: boxes of tensors, files, manifest. No folder, no process group."""

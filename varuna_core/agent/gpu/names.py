"""Names of GPU vendors and of their device files, which other packages need."""

from __future__ import annotations

NVIDIA_SMI = "nvidia-smi"
CUDA_VISIBLE = "CUDA_VISIBLE_DEVICES"
DEVICE_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")
"""Beginnings of the paths of the vendors' device files."""

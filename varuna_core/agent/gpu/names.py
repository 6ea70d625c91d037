"""NVIDIA's names that other rooms need: its tool, and its variable of visible devices."""

from __future__ import annotations

NVIDIA_SMI = "nvidia-smi"
CUDA_VISIBLE = "CUDA_VISIBLE_DEVICES"

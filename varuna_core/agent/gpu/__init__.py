"""Readings of GPUs, and the thread that samples them."""

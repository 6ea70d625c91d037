"""Folders that nobody would make on purpose, and disks that fail, under every command."""

"""Container runtimes behind one small interface. Imports nothing of ours; runs nothing itself."""

"""Container runtimes behind one small interface. Imports the plan's record; runs nothing itself."""

"""Container runtimes behind one small interface; imports the plan's record, and runs nothing."""

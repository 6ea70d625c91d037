"""Hangs staged on this machine: which are found, what they are called, and seconds from the last
step to the next; and healthy runs that look like one."""

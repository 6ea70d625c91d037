"""Programs that others wrote, started from the same conf: their arguments and their files. Pure."""

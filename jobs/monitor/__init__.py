"""One distributed job as a whole: what its files and its scheduler show, and a verdict on it."""

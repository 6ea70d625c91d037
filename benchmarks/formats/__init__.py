"""Corpus of progress formats: real training programs, and logs of programs that train nothing.

The reader that learns formats is judged by it. Each format names the print statement in the
program's own source; its lines have numbers of our own, drawn by a seed, with the truth beside
them, and were written before the reader met them. Those for development may be looked at; those
kept apart, in part drawn by a seed from `rows`, were scored once. `log` is what the agent keeps of
a program's output, `catalog` the list and its split, `reading` what vjob says of a log, `score` the
comparison.
"""

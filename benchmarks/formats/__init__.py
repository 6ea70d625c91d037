"""Corpus of progress formats: 100 real training programs and 30 logs of no training.

It was written before the reader that learns formats, and is what that reader is judged by. Each
format names the print statement in the program's own source; its lines have numbers of our own,
drawn by a seed, with the truth beside them. A fixed seed splits the 100 into 50 for development and
50 kept apart: whoever works on the reader looks at the first half only, and the other half is
scored once. `log` is what the agent keeps of a program's output, `catalog` the list and its split,
`reading` what vjob says of a log, `score` the comparison.
"""

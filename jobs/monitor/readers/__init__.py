"""The files of a run and its scheduler as a `Snapshot`: `open.open_reader`, `judged.JudgedReader`.

Read again and again at the cost of what is new.
"""

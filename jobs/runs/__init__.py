"""The runs of this user: found by what was typed, brought up to date, listed, cancelled, explained.

`find.find_run` and `find.view_run` are the way in. Imports the schedulers and the records.
"""

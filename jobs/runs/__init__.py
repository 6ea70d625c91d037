"""Find, update, list, cancel and explain the runs of this user.

`find.find_run` and `find.view_run` are the entry points. Imports the schedulers and the records.
"""

"""Files that all parts of vjob share: plan, run folder, events, exits, logs. Standard library.

`runfolder` spells every path; `plan.read_plan`, `record.read_record`, `exits.read_outcome` and
`logs/` read the files there; `rank_map` parses the stage map. Imports `facts` and nothing else from
this project.

The node agent carries these modules to nodes whose only interpreter may be an old system python3:
they run on Python 3.8, hence dataclasses without `kw_only` (3.10); build them by keyword all the
same.
"""

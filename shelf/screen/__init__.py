"""Live screen of `vjob status`. The only room that imports Textual.

`start.can_show` says whether there is a terminal for it and `start.show` runs it until it is left;
both are importable without Textual. Imports the monitor's model, readers and log lines.
"""

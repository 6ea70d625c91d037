"""The live screen of `vjob status`, the only package that imports Textual.

`start.can_show` tells if the terminal can show it, and `start.show` runs it until the user leaves;
both can be imported without Textual. Imports the monitor's model, readers and log lines.
"""

"""The words of the `vjob` command: a file a group of commands, click only; each calls one function
of another room. Nothing imports this room.
"""

"""The `vjob` command (`cli.main`): a file for each family of commands, click only.

`cli.COMMANDS` lists them with one line each and the place of each; a command is imported when it is
used. It reads its words, calls one function of another room, prints and exits. It imports what it
calls when it runs, not at the top of its file: `vjob --help`, shell completion and each other
command stay quick, and need none of its libraries. Nothing imports this room.
"""

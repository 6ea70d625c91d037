"""The `vjob` command (`cli.main`), built with click: one file for each family of commands.

`cli.COMMANDS` lists the commands with a one-line help and an import path each; a command's module
is imported only when the command is used. A command parses its arguments, calls one function of
another package, prints the result and exits. The command imports that function when it runs, not at
the top of its file, so that `vjob --help`, shell completion and the other commands stay fast and
need none of the libraries of that package. No other package imports this one.
"""

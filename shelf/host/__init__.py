"""`vjob --host LOGIN ...`: the same command, run by the vjob of a login node over the user's ssh.

`here` is the laptop's side, `there` the login node's; their lines are in `frames`.
Imports of `jobs` how a page is opened, which files a working tree has, processes and errors.
"""

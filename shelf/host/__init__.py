"""`vjob --host LOGIN ...`: the same command, run by the vjob of a login node over the user's ssh.

`here` is the laptop's side, `there` the login node's; they talk in `frames` through one ssh.
Imports of `jobs` how a page is opened, which files a working tree has, processes and errors.
"""

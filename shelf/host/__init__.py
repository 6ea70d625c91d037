"""Run a command by the vjob of a login node over the user's ssh: `vjob --host LOGIN ...`.

`here` is the laptop's side, `there` the login node's; `frames` has the lines between them. Imports
from `jobs` the opening of pages, the listing of working trees, processes and errors.
"""

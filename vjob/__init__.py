"""vjob: train large models with pipeline parallelism on Slurm clusters, mixed or uniform.

The installed package. In a checkout its parts are the folders beside this one, reached by relative
links: `vjob.jobs` (the command), `vjob.templates`, `vjob.reports` and `vjob.containers`. Importing
it imports none of them. No public name here may equal a part's name: importing the part would
replace it.
"""

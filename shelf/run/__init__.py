"""A program as the command line gives it, run without a conf: `vjob run train.py`.

`program.read_program` says what the words start, `slurm_options.build_cluster` makes the conf's
keys of Slurm's options, `conf.build_conf` the conf of both; all are pure, but for looks at the
program's file. `follow.start_run` submits a conf and shows its run to the end. May import the
rooms below `host`.

slurm_options   program <- conf   follow
"""

"""Run a program given on the command line, without a conf: `vjob run train.py`.

`program.read_program` interprets the words, `slurm_options.build_cluster` converts Slurm's options
to keys of the conf, `conf.build_conf` makes the conf of both; all are pure, except that they look
at the program's file. `follow.start_run` submits a conf and shows its run to the end. May import
the packages below `shelf/host` in docs/spine.md.

slurm_options   program <- conf   follow
"""

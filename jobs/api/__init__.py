"""The Python API behind `import vjob`, and the submitit plugin that every submit goes through.

`face` has the functions of `vjob`, `executor.VjobExecutor` is `submitit.AutoExecutor(folder,
cluster="vjob")`, `job.VjobJob` the job that both return. The command line submits here too. May
import every room but the commands; submitit is imported by `executor`, `job` and `watcher`.

confs        watcher <- job <- executor <- face
"""

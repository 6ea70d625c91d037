"""The Python API of `import vjob`, and the submitit plugin that every submit goes through.

`face` has the functions of `vjob`, `executor.VjobExecutor` is the executor of
`submitit.AutoExecutor(folder, cluster="vjob")`, and both return a `job.VjobJob`. The command line
submits through this package too. The package may import all others but the commands; submitit is
imported by `executor`, `job` and `watcher`.

confs        watcher <- job <- executor <- face
"""

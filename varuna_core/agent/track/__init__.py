"""The tracker: one process on the first node that shows a run in W&B, MLflow, TensorBoard and
Prometheus (docs/track.md).

`tracker.run_tracker` is the main function of the process, and `process.TrackerProcess` starts and
ends the process for the agent. `points` reads the run's files, `cursor` keeps the position up to
which a tool has received them, and `tools` sends points to a tool. Only the standard library is
needed: wandb and mlflow are imported where they are used, if they are installed.
"""

"""The tracker: one process on the first node that shows a run in W&B, MLflow, TensorBoard and
Prometheus (docs/track.md).

`tracker.run_tracker` is the process, `process.TrackerProcess` the agent's hold on it. `points`
reads the run's files, `cursor` says what a tool has yet to see, `tools` hands it over. Standard
library only: wandb and mlflow are imported where they are used, if they are there.
"""

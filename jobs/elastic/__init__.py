"""Nodes that join and leave a running job: `vjob grow`, `vjob shrink`, and the autoscaler."""

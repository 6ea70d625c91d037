"""What grows and shrinks a run by itself, by the queue and by slow nodes: `autoscale`, `growth`."""

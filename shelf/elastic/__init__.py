"""Automatic growing and shrinking of a run, by the queue and by slow nodes: `autoscale`,
`growth`."""

"""Processes of this node: started, read from, signalled, ended. The one place that starts them."""

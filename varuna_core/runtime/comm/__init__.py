"""Communication between ranks: tensors, process groups, failures, agreement in a step.

`links.connect` creates a rank's groups and its channels to neighbours; `values` converts values
that cross a cut to tensors. Imports no other package of the runtime, and the records only for the
stage map.
"""

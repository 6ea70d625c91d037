"""Communication between ranks: tensors, process groups, failures, agreement in a step.

`links.connect` makes a rank's groups and its channels to neighbours; `values` takes apart what
crosses a cut. Imports nothing else of the runtime; records for the stage map.
"""

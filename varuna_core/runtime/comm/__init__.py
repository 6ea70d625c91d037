"""Communication between ranks: tensors, process groups, failures, agreement in a step.

`links.connect` makes a rank's groups and its channels to neighbours; `values` converts what crosses
a cut to tensors. Of the runtime it imports nothing else; it imports records for the stage map.
"""

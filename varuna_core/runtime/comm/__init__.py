"""How ranks talk: tensors through channels, process groups, failures, agreement."""

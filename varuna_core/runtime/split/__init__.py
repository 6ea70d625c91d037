"""From a model with CutPoints to the module of each stage: `split.split`. Imports comm's values."""

"""Make data sets in Megatron's `.bin/.idx` format from text, and read them as samples.

`prepare` makes a data set, `gpt` and `bert` read samples, `blend` mixes data sets. Imports numpy
and `varuna_core.records`, never torch, so that a login node can run it. `place.DataPlace` is for
scripts with data of their own, and imports nothing.
"""

"""Copies of a training in the memory of its nodes, optional: an attempt may resume from them.

Varuna meets this room in one place, its base class `copies.KeptInMemory`. `exchange` puts a copy
together from the nodes that hold its shares. Imports saving, checkpoint and records.
"""

"""The training runtime behind `varuna_core.Varuna`.

Rooms, each importing only those before it: comm, split, tensor_parallel, engine, optim, saving.
"""

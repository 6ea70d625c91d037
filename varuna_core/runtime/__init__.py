"""The training runtime behind `varuna_core.Varuna`.

`assembly.assemble` makes a rank's parts from `arguments.VarunaSettings`; `rank_module.RankModule`
is the module that torch and users work with. Rooms, each importing only those before it: comm,
split, tensor_parallel, engine, optim, saving.
"""

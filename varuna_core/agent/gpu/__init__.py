"""Measure a node's accelerators, processors and memory.

    accelerator.py  Accelerator, one vendor's devices; `choose_accelerator` finds those of a node
    nvidia.py       NVIDIA's devices; amd.py and intel.py: those of AMD and Intel. To add a vendor,
                    write a file like these, or a plug-in
    names.py        names of vendors that other packages need
    gauges.py       processors and memory
    sampler.py      Sampler: a thread that writes samples to the logs

Imports `varuna_core.facts`, `plugins` and `records`, and the agent's `processes`.
"""

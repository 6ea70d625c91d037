"""Measure a node's accelerators, processors and memory.

    accelerator.py  Accelerator, one vendor's devices; `choose_accelerator` takes what is here
    nvidia.py       NVIDIA's; amd.py and intel.py: theirs. A further vendor is a file like these, or
                    a plug-in
    names.py        names of vendors that other rooms need
    gauges.py       processors and memory
    sampler.py      Sampler: a thread that writes samples to the logs

Imports `varuna_core.facts`, `plugins` and `records`, and the agent's `processes`.
"""

"""The random equality machine: drawn models in drawn layouts train as the plain model does.

    draws.py (Hypothesis) ─► spec.py ─► worlds.py ─► ranks at hand (tests/ranks/equality_rank.py)
                                        │ model.py in Varuna, plain.py by hand
                                        └ judge.py: equal, refused in words, or a failure

`python -m benchmarks.runtime.equality` runs thousands of draws and writes the page.
"""

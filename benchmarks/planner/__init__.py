"""Benchmarks of the planner: its time, its plans beside the best of all, its predictions.

`python -m benchmarks.planner` measures searches beside FASOP's; `benchmarks.planner.exact` compares
plans with every plan there is; public.py and vtrain.py compare predictions with published
steps, estimates.py those of data sheets.
"""

"""Prepare a search's results for people and programs: plan, cost front, risk, refusal.

`plan.build_plan`, `refusal.search_or_explain`, `front.compute_front`. Imports `search` and `model`.
"""

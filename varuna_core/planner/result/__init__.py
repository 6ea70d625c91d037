"""Results of a search for people and programs: plan, cost front, risk, refusal.

`plan.build_plan`, `refusal.search_or_explain`, `front.compute_front`. Imports `search` and `model`.
"""

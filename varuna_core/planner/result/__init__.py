"""What a search found, for people and programs: plan, cost front, risk, refusal."""

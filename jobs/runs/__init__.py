"""The runs of this user: find one by what was typed, bring its record up to date, list, cancel."""

"""Jinja templates as package data: layout only, every decision is made in Python."""

"""Benchmarks of vjob's commands: start-up, submit, status, report, containers, and their growth."""

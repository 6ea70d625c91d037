"""Detect that a training hangs, from what the agents observe of its ranks.

    flight   dumps of torch's Flight Recorder: `flight.find_gap` finds who missed a collective
    signs    files with each agent's observations of its ranks, and with the hang that was found
    judge    `judge.find_halted` for the ranks of one node, `judge.judge_hang` for all ranks

Processes are observed elsewhere, by a thread of the agent (varuna_core/agent/processes/guard.py).
No torch, Python 3.8; imports records and facts.
"""

"""A training that stands still: what agents see of its ranks, and what follows from it.

    flight   what torch's Flight Recorder kept: `flight.find_gap` finds who missed a collective
    signs    files in which each agent says how its ranks stand, and the hang that was found
    judge    `judge.find_halted` for the ranks of one node, `judge.judge_hang` for those of all

Nothing here looks at a process: the thread that does is varuna_core/agent/processes/guard.py. No
torch, Python 3.8; imports records and facts.
"""

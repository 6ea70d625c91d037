"""Train on nodes that come and go; docs/morph_design.md has the design. Python 3.8, no torch.

    layout ◄─ attempt ─┐                     one manager, beside the batch script
    messages ◄─ machine ◄─ manager ◄─┐
    orders ◄─ node_observer ─┘        cli    `agent.pyz morph ...`
    orders ◄─ node_daemon ◄──────────┘       one on each node
    headless ◄─┘                             a job whose manager is gone for good

`layout.build_attempt` plans for the present nodes, `furthest.Furthest` reads the progress of a
user's script, `gain.pays` tells `vjob` if more nodes are worth a pause. Runs in `agent.pyz` beside
the agent; imports `varuna_core.agent` and `varuna_core.records`.
"""

"""Run the planner for a conf: `resolve_auto.resolve_conf` reads, plans and checks what is
submitted; `question.read_question` and `answer.find_answer` are `vjob plan`.

Imports the conf, the programs, the runs, the schedulers, the reporting and the torch-free planner;
what needs numpy is imported late.
"""

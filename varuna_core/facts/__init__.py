"""Facts about runs as types: causes, evidence, remedies, findings. Text is rendered last.

    cause.py      End: why a run or an attempt ended, who ended it, and what shows it
    sentences.py  describe_end: the sentence for an End
    deciding.py   choose_end: which of two conflicting accounts of an end is believed
    legacy.py     ends in older run folders; the only module that reads sentences of older versions
    known.py      Evidence; Known values, or NotKnown with the reason
    remedy.py     Remedy: what to do; `render` writes it in the words of a conf, of sbatch, ...
    finding.py    Finding: one observation with its values, evidence and remedies

Imports only the standard library and runs on Python 3.8, because the agent on a node uses it.
"""

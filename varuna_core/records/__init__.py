"""The contracts that all parts share: plan, run folder, events, exits. Torch-free, Python 3.8.

The node agent carries these modules into nodes whose only interpreter is an old system python3,
so they use the standard library alone, and dataclasses without `kw_only` (3.10); build them by
keyword all the same.
"""

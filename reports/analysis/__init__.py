"""Tables to figures and findings: `measures.analyse`, `findings`. Imports `load`."""

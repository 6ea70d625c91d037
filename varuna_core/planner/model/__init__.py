"""How long a step of a layout takes and what each stage holds. Imports schedule and `profile`."""

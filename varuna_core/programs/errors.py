"""What a user can mend; the message says how."""


class ProgramError(ValueError):
    """Settings, data and surroundings of a built-in program that do not fit together."""

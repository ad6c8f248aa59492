"""The error for what a user gave and the tools cannot use."""


class InputError(ValueError):
    """Unusable input; the message is one line for the terminal, and the command exits with status 2."""

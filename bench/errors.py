"""The one error that the command line shows without a traceback."""


class InputError(ValueError):
    """An argument or a file that was given is not what is accepted; the message names both."""

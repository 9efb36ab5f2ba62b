"""Sources that look again and again."""


class LookError(Exception):
    """A look failed. The message says why; the notices that were in force stay in force."""

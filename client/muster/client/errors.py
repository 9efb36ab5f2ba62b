"""Errors in the settings of a process."""


class EnvironmentValueError(ValueError):
    """An environment variable, or the argument that it stands for, is missing or not usable."""

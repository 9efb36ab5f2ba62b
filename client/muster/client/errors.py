"""What is wrong with what a process was given."""


class EnvironmentValueError(ValueError):
    """An environment variable, or the argument that it stands for, is missing or not usable."""

"""How many files a process may have open."""

import resource


def allow_many_files() -> None:
    """Raise this process's limit as far as it may go."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

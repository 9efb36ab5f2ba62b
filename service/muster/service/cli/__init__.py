"""The ``muster`` command."""

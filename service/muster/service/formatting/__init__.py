"""Views of the state as text, the same for the command, the status page and the log."""

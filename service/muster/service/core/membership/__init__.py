"""The processes of a run, and which of them speaks for which rank."""

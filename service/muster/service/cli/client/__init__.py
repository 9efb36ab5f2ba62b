"""How a command reaches the coordinator: credentials, the search for the leader, calls."""

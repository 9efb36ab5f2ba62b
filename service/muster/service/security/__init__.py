"""Who may reach the coordinator, and how much of it: TLS, tokens, roles and rates."""

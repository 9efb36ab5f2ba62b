"""Access to the coordinator: TLS, tokens, roles and rates."""

"""Commands that run or maintain a server: serve, config, relay, backup and restore."""

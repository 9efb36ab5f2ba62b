"""The way to the coordinator, for SDK, relay and command: addresses, credentials, failures, constants."""

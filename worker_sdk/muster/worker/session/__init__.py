"""The session that each worker process holds to the coordinator."""

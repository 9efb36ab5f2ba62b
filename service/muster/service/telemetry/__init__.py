"""What the coordinator tells its operators: logs and metrics."""

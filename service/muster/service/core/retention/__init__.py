"""When the coordinator forgets a run."""

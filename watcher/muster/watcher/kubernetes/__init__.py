"""Kubernetes as a watcher sees it: its API, and how its objects are read."""

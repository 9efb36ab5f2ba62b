"""A watcher on a node: it turns notices of the scheduler or the cloud into requests for a save.

It holds no state that matters: a notice has the same id after each restart, and the coordinator knows which
notices it has had.
"""

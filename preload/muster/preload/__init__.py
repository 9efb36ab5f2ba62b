"""Starts a node's workers from one process that has imported torch already: ``PYTHON_EXEC=muster-python``.

torchrun's agent starts a fork server (:mod:`~muster.worker.node.fork_server`), which imports modules
once and then forks each worker (:mod:`~muster.preload.fork_server`). ``muster-python``
(:mod:`~muster.preload.launcher`) is the process that torchrun starts for each worker. It asks the fork
server for the worker, passes signals on to it, and ends as it does. Without a fork server it is Python.
"""

"""The queue of asynchronous saves: a pure ledger, the threads around it, and the public queue."""

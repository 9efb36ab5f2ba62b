"""The sessions of this process: one for each coordinator, run, generation and rank."""

import atexit
import os
import threading

from muster.worker.session.age import restart
from muster.worker.session.session import Session, SessionConfig
from muster.worker.transport import fork_guard

_lock = threading.Lock()
_sessions: dict[SessionConfig, Session] = {}


def session_for(config: SessionConfig) -> Session:
    """Return the process's session for this config; open it at the first call.

    An ended session is replaced, unless this process was evicted or its run was forgotten.

    Raises:
        MusterError: this process was forked from one that uses gRPC.
    """
    fork_guard.check()
    with _lock:
        session = _sessions.get(config)
        if session is None or (session.ended and not session.dismissed):
            session = _sessions[config] = Session(config)
        return session


def close(reason: str = "") -> None:
    """Say goodbye on all sessions of this process.

    Barriers that still need its ranks fail immediately. A normal exit of the interpreter calls this.

    Args:
        reason: why, for people.
    """
    with _lock:
        sessions = list(_sessions.values())
        _sessions.clear()
    for session in sessions:
        restart()
        session.close(reason)
    fork_guard.collect()


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
atexit.register(close, "the process ended")

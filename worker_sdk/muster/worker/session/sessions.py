"""The sessions of this process: one for each coordinator, run, generation and rank."""

import atexit
import os
import threading

from muster.worker.session.age import begin_anew
from muster.worker.session.session import Session, SessionConfig
from muster.worker.transport import fork_guard

_lock = threading.Lock()
_sessions: dict[SessionConfig, Session] = {}


def session_for(config: SessionConfig) -> Session:
    """The process's session for this config; it is opened at the first call.

    One that was ended is opened anew, unless this process was evicted, or its run forgotten.

    Raises:
        MusterError: this process was forked from one that speaks gRPC.
    """
    fork_guard.check()
    with _lock:
        session = _sessions.get(config)
        if session is None or (session.ended and not session.dismissed):
            session = _sessions[config] = Session(config)
        return session


def close(reason: str = "") -> None:
    """Say goodbye on all sessions of this process.

    Barriers that still need its ranks fail at once. It is called when the interpreter ends normally.

    Args:
        reason: why, for people.
    """
    with _lock:
        sessions = list(_sessions.values())
        _sessions.clear()
    for session in sessions:
        begin_anew()
        session.close(reason)
    fork_guard.collect()


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
atexit.register(close, "the process ended")

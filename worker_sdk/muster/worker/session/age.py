"""For how long this process has been there: what tells a rank that comes late from a job started again."""

import os
import time

_began = time.monotonic()


def age() -> float:
    """Seconds since the process imported this or was forked, or since it last said goodbye.

    Never too much, for the coordinator holds it against those who left meanwhile. So it is not what the
    kernel says of the process: a program may begin anew within one (``exec``), and imports this again then.
    """
    return time.monotonic() - _began


def begin_anew() -> None:
    """This process is another one from now on, as it was forked or says goodbye."""
    global _began
    _began = time.monotonic()


os.register_at_fork(after_in_child=begin_anew)

"""The ``muster`` command on a machine whose clock is wrong: ``SECONDS serve …``.

Only what Muster itself reads is wrong: gRPC takes its deadlines from two clocks, which must agree.
"""

import time
from types import SimpleNamespace

from muster.service import clock
from tests.support.chaos.program import muster


def go_wrong(seconds: str) -> None:
    """Set the clock ahead."""
    wrong = SimpleNamespace(monotonic=time.monotonic, time=lambda: time.time() + float(seconds))
    vars(clock)["time"] = wrong


if __name__ == "__main__":
    muster(go_wrong)

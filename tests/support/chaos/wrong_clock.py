"""The ``muster`` command on a machine whose clock is wrong: ``SECONDS serve …``.

Only what Muster itself reads is wrong: gRPC takes its deadlines from two clocks, which must agree.
"""

import sys
import time
from types import SimpleNamespace

from muster.service import clock
from muster.service.cli.main import app

if __name__ == "__main__":
    ahead, *arguments = sys.argv[1:]
    wrong = SimpleNamespace(monotonic=time.monotonic, time=lambda: time.time() + float(ahead))
    vars(clock)["time"] = wrong
    sys.argv = ["muster", *arguments]
    app()

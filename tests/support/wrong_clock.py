"""The ``muster`` command on a machine whose clock is wrong: ``SECONDS serve …``."""

import sys
import time

ahead, *arguments = sys.argv[1:]
_right = time.time
time.time = lambda: _right() + float(ahead)

if __name__ == "__main__":
    from muster.service.cli.main import app

    sys.argv = ["muster", *arguments]
    app()

"""The ``muster`` script, as a module."""

from muster.service.cli.script import main

if __name__ == "__main__":
    main()

"""The version of this SDK, as it is told to the coordinator."""

from importlib.metadata import version

VERSION = version("muster-coordinator")

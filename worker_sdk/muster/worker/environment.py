"""Settings that a worker may take from environment variables. Explicit arguments win."""

import os
import socket
from collections.abc import Mapping

from muster.client.addresses import checked
from muster.client.errors import EnvironmentValueError as EnvironmentValueError

DEFAULT_RUN_ID = "default"
DEFAULT_STOPPED_EXIT_CODE = 75
"""``EX_TEMPFAIL`` of sysexits.h: the caller may try again. torchrun ends with 0, 1 or 2. A shell ends with
126 or more if it could not run a program, or if a signal ended it. So 75 can be told from the others."""


def endpoint(given: str | None, environ: Mapping[str, str] = os.environ) -> str:
    """Return the coordinator's address: the argument, else ``MUSTER_ENDPOINT``.

    Returns:
        ``HOST:PORT`` or ``unix:///PATH``, or several with commas between.

    Raises:
        EnvironmentValueError: neither is given, or a part of it is not an address.
    """
    value = given or environ.get("MUSTER_ENDPOINT", "")
    if not value:
        raise EnvironmentValueError(
            'no coordinator is named: pass endpoint="host:port" or set MUSTER_ENDPOINT.'
        )
    return checked(value)


def run_id(given: str | None, environ: Mapping[str, str] = os.environ) -> str:
    """Return the run: the argument, ``MUSTER_RUN_ID``, ``TORCHELASTIC_RUN_ID``, else ``default``.

    Raises:
        EnvironmentValueError: UTF-8 cannot encode it.
    """
    value = given or environ.get("MUSTER_RUN_ID") or environ.get("TORCHELASTIC_RUN_ID") or DEFAULT_RUN_ID
    return text("run_id", value)


def generation(given: int | None, environ: Mapping[str, str] = os.environ) -> int:
    """Return the job's life: the argument, ``MUSTER_ROUND``, ``TORCHELASTIC_RESTART_COUNT``, else 0.

    Raises:
        EnvironmentValueError: it is not a number from 0 up.
    """
    return _number("generation", given, ("MUSTER_ROUND", "TORCHELASTIC_RESTART_COUNT"), environ, 0)


def rank(given: int | None, environ: Mapping[str, str] = os.environ) -> int:
    """Return the global rank: the argument, else ``RANK``.

    Raises:
        EnvironmentValueError: neither is set, or the value is not a number from 0 up.
    """
    return _number("global_rank", given, ("RANK",), environ, None)


def world_size(given: int | None, environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of ranks: the argument, else ``WORLD_SIZE``.

    Raises:
        EnvironmentValueError: neither is set, or the value is not a number from 0 up.
    """
    return _number("global_world_size", given, ("WORLD_SIZE",), environ, None)


def node_rank(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return this node's rank in its round: ``GROUP_RANK``, as torchrun sets it; None if it is not set.

    Raises:
        EnvironmentValueError: it is not a number from 0 up.
    """
    value = environ.get("GROUP_RANK")
    return _natural("GROUP_RANK", value) if value else None


def stopped_exit_code(environ: Mapping[str, str] = os.environ) -> int:
    """Return the exit code of agents of a stopped run: ``MUSTER_STOPPED_EXIT_CODE``, else 75.

    Raises:
        EnvironmentValueError: it is not a number from 0 to 255.
    """
    value = environ.get("MUSTER_STOPPED_EXIT_CODE", "")
    code = _natural("MUSTER_STOPPED_EXIT_CODE", value) if value else DEFAULT_STOPPED_EXIT_CODE
    if code > 255:
        raise EnvironmentValueError(
            f"MUSTER_STOPPED_EXIT_CODE={value}: an exit code is at most 255. Set 75, or 0 for torchrun's own."
        )
    return code


def _number(
    name: str,
    given: int | None,
    variables: tuple[str, ...],
    environ: Mapping[str, str],
    default: int | None,
) -> int:
    if given is not None:
        return _natural(name, str(given))
    for variable in variables:
        if environ.get(variable):
            return _natural(variable, environ[variable])
    if default is None:
        raise EnvironmentValueError(f"{name} is not given and {' or '.join(variables)} is not set.")
    return default


MAX_NUMBER = 2**31 - 1
"""The largest rank, world size or generation that fits the protocol's fields."""


def _natural(name: str, value: str) -> int:
    if not (
        value.isascii()
        and value.isdigit()
        and len(value) <= len(str(MAX_NUMBER))
        and int(value) <= MAX_NUMBER
    ):
        raise EnvironmentValueError(
            f"{name} = {value:.40}: it must be a whole number from 0 to {MAX_NUMBER}."
        )
    return int(value)


def text(name: str, value: str) -> str:
    """Check that UTF-8 can encode a name, and return the name.

    Raises:
        EnvironmentValueError: it has lone surrogates, which stand for bytes that are not UTF-8.
    """
    try:
        value.encode()
    except UnicodeEncodeError:
        raise EnvironmentValueError(f"{name} = {value!a}: it cannot be put in UTF-8.") from None
    return value


def host() -> str:
    """Return the name under which this machine's processes are reported."""
    return socket.gethostname() or "unknown host"

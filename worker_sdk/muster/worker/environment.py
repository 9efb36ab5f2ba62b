"""Settings that a worker may take from environment variables. Explicit arguments win."""

import functools
import logging
import os
from collections.abc import Callable, Mapping

from muster.client import launchers
from muster.client.addresses import checked
from muster.client.errors import EnvironmentValueError as EnvironmentValueError
from muster.client.launchers import Launcher
from muster.client.node_name import host_name as host_name
from muster.client.node_name import node_name as node_name

logger = logging.getLogger(__name__)

DEFAULT_RUN_ID = "default"
KEEPER = "MUSTER_KEEPER"
OWN_KEEPER, NODE_KEEPER = "own", "node"
LAUNCHER = "muster-python"
"""What ``PYTHON_EXEC`` names for preloaded workers."""
PRELOAD = "MUSTER_PRELOAD"
DEFAULT_PRELOAD = ("torch", "torch.distributed.checkpoint", "muster.worker.barriers", "muster.worker.saves")
DEFAULT_STOPPED_EXIT_CODE = 75
"""``EX_TEMPFAIL`` of sysexits.h: the caller may try again. torchrun ends with 0, 1 or 2. A shell ends with
126 or more if it could not run a program, or if a signal ended it. So 75 can be told from the others."""
MAX_SHUTDOWN_TIMEOUT = 86_400
"""Seconds. A longer time is no deadline."""


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
    """Return the run: argument, ``MUSTER_RUN_ID``, ``TORCHELASTIC_RUN_ID``, a launcher's job, ``default``.

    The launcher's job is Slurm's, else the namespace of PMIx. A task of an array is ``ARRAY_TASK``: this name
    stays the same when Slurm requeues the task.

    Raises:
        EnvironmentValueError: UTF-8 cannot encode it.
    """
    variables = ("MUSTER_RUN_ID", "TORCHELASTIC_RUN_ID")
    named = given or next((environ[one] for one in variables if environ.get(one)), None)
    job = launchers.slurm_job(environ) or environ.get(launchers.PMIX_JOB)
    return text("run_id", named or job or DEFAULT_RUN_ID)


def generation(
    given: int | None, environ: Mapping[str, str] = os.environ, *, given_run_id: str | None = None
) -> int:
    """Return the life: argument, ``MUSTER_ROUND``, ``TORCHELASTIC_RESTART_COUNT``, Slurm's count, 0.

    ``SLURM_RESTART_COUNT`` counts the lives of one Slurm job. A run with a name of its own may consist of
    several Slurm jobs, so the variable counts only for a run that is named after its job.

    Args:
        given: the argument.
        environ: the environment.
        given_run_id: the argument for the run, if there is one.

    Raises:
        EnvironmentValueError: it is not a number from 0 up.
    """
    if given is not None:
        return _natural("generation", str(given))
    variables = ["MUSTER_ROUND", "TORCHELASTIC_RESTART_COUNT"]
    if run_id(given_run_id, environ) == launchers.slurm_job(environ):
        variables.append(launchers.SLURM_RESTARTS)
    for variable in variables:
        if environ.get(variable):
            return _natural(variable, environ[variable])
    return 0


def rank(given: int | None, environ: Mapping[str, str] = os.environ) -> int:
    """Return the global rank: the argument, ``RANK``, else what another launcher says.

    Raises:
        EnvironmentValueError: nothing says it, or the value is not a number from 0 up.
    """
    return _placement("global_rank", given, lambda launcher: launcher.rank, environ)


def world_size(given: int | None, environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of ranks: the argument, ``WORLD_SIZE``, else what another launcher says.

    Raises:
        EnvironmentValueError: nothing says it, or the value is not a number from 0 up.
    """
    return _placement("global_world_size", given, lambda launcher: launcher.world_size, environ)


def keeper(environ: Mapping[str, str] = os.environ) -> str:
    """Return where the keeper of local checkpoints comes from: ``MUSTER_KEEPER``, else ``own``.

    Returns:
        ``own``: the first rank of a node starts it. ``node``: ``muster keep --runs`` does so on each node.

    Raises:
        EnvironmentValueError: it is neither of them.
    """
    value = environ.get(KEEPER) or OWN_KEEPER
    if value not in (OWN_KEEPER, NODE_KEEPER):
        raise EnvironmentValueError(f'{KEEPER} = {value!r}: it is "{OWN_KEEPER}" or "{NODE_KEEPER}".')
    return value


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


def preloaded_modules(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return what the agent's fork server imports for the workers: ``MUSTER_PRELOAD``, else torch and Muster.

    Returns:
        Names of modules; none, unless ``PYTHON_EXEC`` says that torchrun starts workers by ``muster-python``.

    Raises:
        EnvironmentValueError: it has something that is not the name of a module.
    """
    if os.path.basename(environ.get("PYTHON_EXEC", "")) != LAUNCHER:  # noqa: PTH119
        return ()
    value = environ.get(PRELOAD)
    if not value:
        return DEFAULT_PRELOAD
    names = tuple(part.strip() for part in value.split(","))
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise EnvironmentValueError(
                f"{PRELOAD} = {value:.200}: {name!r} is not the name of a module. Write names with commas "
                f"between, such as {','.join(DEFAULT_PRELOAD[:2])},transformers."
            )
    return names


def shutdown_timeout(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the seconds from SIGTERM until torchrun kills its workers; None: this process cannot tell.

    It can tell by ``TORCH_ELASTIC_SHUTDOWN_TIMEOUT``, which torchrun's workers inherit. They do not see
    torchrun's flag ``--shutdown-timeout``, so torch's default of 30 s is not assumed without the variable.
    """
    value = environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")
    if not environ.get("TORCHELASTIC_RUN_ID") or not (value.isascii() and value.isdigit()):
        return None
    seconds = int(value) if len(value) <= len(str(MAX_SHUTDOWN_TIMEOUT)) else 0
    return seconds if 0 < seconds <= MAX_SHUTDOWN_TIMEOUT else None


def _placement(
    name: str, given: int | None, variable_of: Callable[[Launcher], str], environ: Mapping[str, str]
) -> int:
    if given is not None:
        return _natural(name, str(given))
    launcher = launchers.find(environ)
    variable = variable_of(launcher or launchers.TORCH)
    if not environ.get(variable):
        raise EnvironmentValueError(
            f"{name} is not given and {variable} is not set. {_looked_for(launcher, variable_of)}"
        )
    value = _natural(variable, environ[variable])
    if launcher is not None and launcher is not launchers.TORCH:
        _log_launcher(launcher, environ[launcher.rank], environ[launcher.world_size])
    return value


def _looked_for(launcher: Launcher | None, variable_of: Callable[[Launcher], str]) -> str:
    if launcher is not None:
        return f"{launcher.rank} and {launcher.world_size} come from one launcher: set both."
    others = ", ".join(f"{variable_of(one)} ({one.name})" for one in launchers.OTHERS)
    return (
        f"No other launcher says it either; looked for {others}. Pass it, or start the process by a launcher."
    )


@functools.cache
def _log_launcher(launcher: Launcher, rank: str, world_size: str) -> None:
    """Say once in a process where its rank comes from."""
    logger.info(
        "this is rank %s of %s, as %s says (%s, %s)",
        rank,
        world_size,
        launcher.name,
        launcher.rank,
        launcher.world_size,
    )


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

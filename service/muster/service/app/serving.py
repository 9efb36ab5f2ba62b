"""Run a coordinator: alone on its state, or as one of several."""

import asyncio
import gc
import signal

from muster.service.app import coordinator, replica
from muster.service.app.ports import check_exposed, open_gate
from muster.service.app.surroundings import Surroundings
from muster.service.config import Config
from muster.service.etcd.location import SCHEME
from muster.service.rpc.server import METHODS
from muster.service.storage.location import engine_for
from muster.service.telemetry.metrics import Metrics

GARBAGE_THRESHOLDS = (50_000, 10, 20)
"""How many objects come, net, before the collector of cycles looks at the young ones, and how often it looks
at the older ones then. Arrivals live until their barrier is decided, and leave by their reference counts:
with CPython's 700 the collector looked at all that a large barrier holds again and again, for a sixth of
the time at 1,024 ranks and a third at 16,384."""


async def serve(config: Config) -> None:
    """Run a coordinator until SIGTERM or SIGINT.

    Raises:
        StartError: a port is open to strangers or cannot be bound; or a certificate or the tokens file
            cannot be used.
        StorageError: the state cannot be opened, read or written; or another replica leads now, or may.
    """
    check_exposed(
        config.listen,
        config.security,
        insecure=config.insecure,
        use="whoever reaches it, or is on the way, could release, abort and read barriers, and change stores",
    )
    spare_garbage_collector()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    around = Surroundings(config, open_gate(config.security), Metrics(), stop)
    for method, kind in METHODS.items():
        around.metrics.expect(kind, method)
    if around.gate.tls is not None:
        around.metrics.show_certificate_expiry(around.gate.tls)
    if config.state.startswith(SCHEME):
        await replica.run(around)
    else:
        await coordinator.run(around, engine_for(config.state))


def spare_garbage_collector() -> None:
    """Let the collector of cycles look seldom, and never at the modules.

    Modules stay until the end. To look at them took most of a pause of 0.2 s during the start of a large job.
    """
    gc.freeze()
    gc.set_threshold(*GARBAGE_THRESHOLDS)

"""End a rank's interpreter while a thread of gRPC holds the lock of a stream, if one still runs then.

gRPC's threads are slow with each event of the exit, and hold the lock meanwhile. The last exit hook waits
until one does so.
"""

import atexit
import threading
import time
from typing import Any

EVENT_SECONDS = 0.2
HOOK_SECONDS = 0.5

exiting, holds_the_lock = threading.Event(), threading.Event()
atexit.register(holds_the_lock.wait, HOOK_SECONDS)  # Before any import, so it runs last.

import grpc._channel  # noqa: E402
import torch.distributed as dist  # noqa: E402

import muster.worker  # noqa: E402

grpc_channel: Any = grpc._channel
handle_event = grpc_channel._handle_event


def handle_slowly(*event: Any) -> Any:
    """Handle an event under the lock, as gRPC does."""
    if exiting.is_set():
        holds_the_lock.set()
        time.sleep(EVENT_SECONDS)
        holds_the_lock.clear()
    return handle_event(*event)


grpc_channel._handle_event = handle_slowly
dist.init_process_group("gloo", init_method="muster://")
dist.barrier()
dist.destroy_process_group()
muster.worker.close()  # Else the exit does, and takes so long that no thread holds a lock after it.
atexit.register(exiting.set)  # It runs first.
print("finished")

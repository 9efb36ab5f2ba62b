"""A rank whose interpreter ends while a thread of gRPC holds the lock of a stream.

gRPC's threads take 0.2 s with each event, and hold the lock meanwhile. The last exit hook lets them begin.
"""

import atexit
import time
from typing import Any

EVENT_SECONDS = 0.2

atexit.register(time.sleep, EVENT_SECONDS / 2)  # Before any import, so it runs last.

import grpc._channel  # noqa: E402
import torch.distributed as dist  # noqa: E402

grpc_channel: Any = grpc._channel
handle_event = grpc_channel._handle_event


def handle_slowly(*event: Any) -> Any:
    """Handle an event under the lock, as gRPC does."""
    time.sleep(EVENT_SECONDS)
    return handle_event(*event)


grpc_channel._handle_event = handle_slowly
dist.init_process_group("gloo", init_method="muster://")
dist.barrier()
dist.destroy_process_group()
print("finished")

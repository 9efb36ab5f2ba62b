"""The peers' own calling code, run by a rank with its import line changed to Muster's.

There is no GPU here: the calls of `torch.cuda` that this code makes on its way are void.
"""

import importlib.util
import inspect
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.support.expect import of_kind

if TYPE_CHECKING:
    from muster.worker.saves import AsyncCallsQueue

OURS = "from muster.worker.saves import"
RESILIENCY = "nvidia_resiliency_ext.checkpointing.async_ckpt"
MEGATRON = "megatron.core.dist_checkpointing"
CHANGED = {
    f"{RESILIENCY}.torch_ckpt": "from .core import",
    f"{MEGATRON}.strategies.torch": "from .async_utils import",
    f"{MEGATRON}.strategies.base": "from .async_utils import",
    f"{MEGATRON}.serialization": "from .strategies.async_utils import",
}
"""The start of the line that is changed, by module."""


class ChangedImport(MetaPathFinder, Loader):
    """Finds the modules above, and changes that one line of each."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The module's own spec, to be loaded by this."""
        if name not in CHANGED:
            return None
        spec = PathFinder.find_spec(name, path)  # type: ignore[arg-type]
        assert spec is not None
        assert spec.origin is not None
        return importlib.util.spec_from_file_location(name, spec.origin, loader=self)

    def create_module(self, spec: ModuleSpec) -> None:
        """As usual."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the changed source."""
        assert module.__file__ is not None
        source = Path(module.__file__).read_text()
        assert source.count(CHANGED[module.__name__]) == 1, "it has no such line"
        changed = source.replace(CHANGED[module.__name__], OURS)
        exec(compile(changed, module.__file__, "exec"), module.__dict__)


def torch_async_checkpoint(folder: Path, *, persistent: bool) -> None:
    """nvidia-resiliency-ext's TorchAsyncCheckpoint."""
    from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

    checkpoint = TorchAsyncCheckpoint(persistent_queue=persistent)
    rank = dist.get_rank()
    for step in range(3):
        state = {"weight": torch.full((8,), float(10 * step + rank))}
        checkpoint.async_save(state, folder / f"{step}-{rank}.pt")
        checkpoint.finalize_async_save(blocking=False, no_dist=True)
    checkpoint.finalize_async_save(blocking=True, no_dist=False, terminate=True)
    loaded = torch.load(folder / f"2-{rank}.pt")
    assert torch.equal(loaded["weight"], torch.full((8,), float(20 + rank)))


def resiliency_writer(folder: Path, *, persistent: bool) -> None:
    """nvidia-resiliency-ext's FileSystemWriterAsync, called as its documentation says."""
    from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
    from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import (
        save_state_dict_async_finalize,
        save_state_dict_async_plan,
    )
    from torch.distributed.checkpoint import DefaultSavePlanner

    from muster.worker.saves import AsyncCallsQueue, AsyncRequest

    queue = AsyncCallsQueue(persistent=persistent)
    for step in range(3):
        state = {f"weight-{dist.get_rank()}": torch.full((8,), float(step))}
        writer = FileSystemWriterAsync(folder / str(step), thread_count=2)
        planned = save_state_dict_async_plan(state, writer, None, 0, planner=DefaultSavePlanner())
        planned = planned[0] if isinstance(planned[0], tuple) else planned
        save_fn, preload_fn, save_args = writer.get_save_function_and_args()
        finalize = partial(save_state_dict_async_finalize, *planned)
        queue.schedule_async_request(AsyncRequest(save_fn, save_args, [finalize], preload_fn=preload_fn))
        queue.maybe_finalize_async_calls(blocking=True, no_dist=False)
    queue.close()
    _expect_loaded(folder / "2", 2.0)


def megatron(folder: Path, *, persistent: bool) -> None:
    """Megatron's dist_checkpointing.save(async_sharded_save=True), scheduled as its training loop does."""
    from megatron.core.dist_checkpointing import ShardedTensor, save

    from muster.worker.saves import AsyncCallsQueue

    queue = AsyncCallsQueue(persistent=persistent)
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        path = folder / str(step)
        path.mkdir(exist_ok=True)
        dist.barrier()
        weight = torch.full((8,), float(10 * step + rank))
        state = {"weight": ShardedTensor.from_rank_offsets("weight", weight, (0, rank, world))}
        request = save(state, str(path), async_sharded_save=True)
        request.add_finalize_fn(lambda path=path: (path / f"finalized-{rank}").touch())
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True, no_dist=False)
    queue.close()
    assert (folder / "2" / f"finalized-{rank}").exists()
    assert (folder / "2" / "metadata.json").exists()
    loaded = {"weight": torch.zeros(8 * world)}
    dcp.load(loaded, checkpoint_id=folder / "2")
    assert loaded["weight"].tolist() == [20.0 + n // 8 for n in range(8 * world)]


def resiliency_restart(folder: Path, *, persistent: bool) -> None:
    """What code for nvidia-resiliency-ext 0.7 does around a restart in the process: abort, and go on.

    Its wheels are for Python 3.12 and newer, so the calls are made here.
    """
    from muster.worker.saves import (
        AsyncCallsQueue,
        AsyncRequest,
        TorchAsyncCheckpoint,
        abort_nvrx_checkpoint,
    )

    rank = dist.get_rank()
    queue = AsyncCallsQueue(
        persistent=persistent,
        is_daemon=False,
        cpu_priority=10,
        io_priority=3,
        sigterm_timeout=5.0,
        cpu_shm_mode=False,
    )
    checkpoint = TorchAsyncCheckpoint(persistent_queue=persistent)
    both = [queue, checkpoint._get_async_calls_queue()]
    assert set(AsyncCallsQueue.get_instances()) == set(both)
    for turn in range(2):
        path = folder / f"{turn}-{rank}"
        nothing: Any = None
        request = AsyncRequest(torch.save, (torch.full((8,), float(turn)), path), [], async_fn_kwargs=nothing)
        request.add_finalize_fn(partial(path.rename, path.with_suffix(".pt")))
        queue.schedule_async_request(request)
        checkpoint.async_save({"weight": torch.full((8,), float(turn))}, folder / f"torch-{turn}-{rank}.pt")
        queue.maybe_finalize_async_calls(blocking=True, no_dist=False)
        checkpoint.finalize_async_save(blocking=True, no_dist=True)
        assert torch.equal(torch.load(path.with_suffix(".pt")), torch.full((8,), float(turn)))
        assert torch.load(folder / f"torch-{turn}-{rank}.pt")["weight"][0] == turn
        if persistent:
            assert all(has_worker(one) for one in both)
        queue.schedule_async_request(AsyncRequest(time.sleep, (600.0,), []))
        dist.barrier()
        abort_nvrx_checkpoint()
        assert queue.get_num_unfinalized_calls() == 0
        if persistent:
            assert not any(has_worker(one) for one in both)
        dist.barrier()
    queue.close()
    checkpoint.close(abort=True)


def has_worker(queue: "AsyncCallsQueue") -> bool:
    """Whether its persistent worker runs, as their tests ask it."""
    from muster.worker.saves import PersistentCaller

    return of_kind(PersistentCaller, queue._get_async_caller())._debug_is_async_process_running()


def megatron_loop(folder: Path, *, persistent: bool) -> None:
    """What Megatron's training loop does with a queue since it takes nvidia-resiliency-ext's.

    That loop is in no release on PyPI, so the calls are made here.
    """
    from muster.worker.saves import AsyncCallsQueue, AsyncRequest

    rank = dist.get_rank()
    for turn in range(2):
        asked = inspect.signature(AsyncCallsQueue.__init__).parameters
        more: dict[str, Any] = {"cpu_shm_mode": True} if "cpu_shm_mode" in asked else {}
        queue = AsyncCallsQueue(persistent=persistent, **more)
        if persistent:
            assert "cpu_shm_mode" in inspect.signature(AsyncCallsQueue.warmup_persistent_caller).parameters
            AsyncCallsQueue.warmup_persistent_caller(
                rank, cpu_priority=10, io_priority=None, cpu_shm_mode=True
            )
        done: list[int] = []
        weight = torch.full((8,), float(turn))
        queue.schedule_async_request(
            AsyncRequest(
                torch.save,
                (weight, folder / f"{turn}-{rank}.pt"),
                [partial(done.append, 1)],
                async_fn_kwargs={},
                preload_fn=None,
            )
        )
        assert queue.get_num_unfinalized_calls() == 1
        queue.maybe_finalize_async_calls(True, no_dist=False)
        assert done == [1]
        queue.close(abort=turn == 0)
        assert torch.equal(torch.load(folder / f"{turn}-{rank}.pt"), weight)


def _expect_loaded(path: Path, value: float) -> None:
    loaded = {f"weight-{rank}": torch.zeros(8) for rank in range(dist.get_world_size())}
    dcp.load(loaded, checkpoint_id=path)
    for tensor in loaded.values():
        assert torch.equal(tensor, torch.full((8,), value))


CALLS: tuple[Callable[..., None], ...] = (
    resiliency_restart,
    torch_async_checkpoint,
    resiliency_writer,
    megatron_loop,
    megatron,
)
"""One after the other in one process. The first looks at all the queues that there are."""


def main() -> None:
    """Play one rank: the kind of caller, rank, world size, folder."""
    kind, rank, world, folder = sys.argv[1:]
    sys.meta_path.insert(0, ChangedImport())
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}-store", rank=int(rank), world_size=int(world)
    )
    for calls in CALLS:
        own = Path(folder, calls.__name__)
        own.mkdir(exist_ok=True)
        calls(own, persistent=kind == "persistent")
        dist.barrier()
        print("well:", calls.__name__, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""The training process of the benchmark of saves."""

import ctypes
import gc
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.peers.saves import SAVERS, Saver, State, remove
from benchmarks.saving.results import Sample

GIB = 2**30
TENSOR_BYTES = 16 * 2**20
"""Size of each tensor of the state."""
LOOK_EVERY = 0.01
"""Seconds that training goes on, at least, between two looks whether a save is done: a job's short step."""


def train(system: str, gib: int, repeats: int, device: str, folder: Path, pipe: Connection) -> None:
    """A training process of one rank that saves and trains on."""
    import torch

    # The other core is the writer's.
    torch.set_num_threads(1)
    try:
        state = {
            f"layer-{number}": torch.zeros(TENSOR_BYTES // 4, device=device)
            for number in range(gib * GIB // TENSOR_BYTES)
        }
        saver = SAVERS[system][1](folder)
        trainer = _Trainer(state, torch.cuda.synchronize if device == "cuda" else lambda: None)
        speed = trainer.speed_alone()
        for number in range(repeats + 1):
            pipe.send("begin")
            pipe.recv()
            sample = _save(saver, number, trainer, speed)
            pipe.send("end")
            pipe.recv()
            sample.torn = _is_torn(saver, number, trainer.at_call, device)
            # What was loaded would count as the next save's memory.
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            pipe.send(sample)
            remove(folder, number - 1)
        saver.close()
        pipe.send(None)
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
        raise
    finally:
        if "muster" in system:
            import muster.worker

            muster.worker.close()


class _Trainer:
    """Training: one tensor after the other is changed in place."""

    def __init__(self, state: State, synchronize: Callable[[], None]) -> None:
        self.state = state
        self._synchronize = synchronize
        self._tensors = list(state.values())
        self._step = 0
        self.at_call: list[float] = []

    def step(self) -> None:
        self._tensors[self._step % len(self._tensors)].add_(1)
        self._synchronize()
        self._step += 1

    def speed_alone(self) -> float:
        """Steps a second, when nothing else is done, after steps that load the kernels."""
        count = 2 * len(self._tensors)
        for _ in range(count):
            self.step()
        began = time.monotonic()
        for _ in range(count):
            self.step()
        return count / (time.monotonic() - began)


def _save(saver: Saver, number: int, trainer: _Trainer, speed: float) -> Sample:
    trainer.at_call = [float(tensor[0]) for tensor in trainer.state.values()]
    began = time.monotonic()
    saver.save(number, trainer.state)
    stall = time.monotonic() - began
    steps, trained = 0, 0.0
    while True:
        looked = time.monotonic()
        done = saver.done()
        now = time.monotonic()
        if done:
            # What it does to sync is not the training thread's wait: a job would do so elsewhere.
            break
        stall += now - looked
        while (spent := time.monotonic() - now) < LOOK_EVERY:
            trainer.step()
            steps += 1
        trained += spent
    return Sample(stall, now - began, steps / trained / speed if trained > 0.05 else 0.0, torn=False)


def _is_torn(saver: Saver, number: int, expected: list[float], device: str) -> bool:
    import torch

    empty = {f"layer-{n}": torch.empty(TENSOR_BYTES // 4, device=device) for n in range(len(expected))}
    loaded = saver.load(number, empty)
    return any(
        not torch.equal(tensor, torch.full_like(tensor, value))
        for tensor, value in zip(loaded.values(), expected, strict=True)
    )

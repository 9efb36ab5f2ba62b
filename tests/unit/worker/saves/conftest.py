"""What all tests of saves begin with."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from lab.processes import fork_client
from muster.worker.saves.queue import groups


@pytest.fixture(scope="package", autouse=True)
def _workers_are_forked() -> Iterator[None]:
    """Those of ``persistent=True``, each of which would import torch, and programs of the tests' own."""
    with pytest.MonkeyPatch.context() as patched, fork_client.spawning():
        patched.setattr(fork_client, "forks", True)
        yield


@pytest.fixture(autouse=True)
def a_process_of_its_own() -> Iterator[None]:
    """No group is taken, numbered or retired by another test."""
    # Not the tests' own: what they patch is to be undone before what they have asked for.
    with pytest.MonkeyPatch.context() as patched:
        for name, empty in (("_taken", set()), ("_numbered", set()), ("_retired", {})):
            patched.setattr(groups, name, empty)
        yield


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """This process, as all of a job.

    Its process group is not gloo's. torch keeps a group for its thread. A child that is forked from another
    thread would end the group, and hang or die in gloo's destructor.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()

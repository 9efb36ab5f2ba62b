"""A real etcd for tests: one member or several, started, stopped, killed and started again."""

import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from lab.patience import PATIENCE, until
from lab.processes.coordinator import free_port
from lab.processes.tools import tool
from muster.etcd.v3 import etcd_pb2
from muster.service.etcd.client import RANGE, STATUS


class Member:
    """One member of a cluster, as a child process.

    Args:
        name: its name.
        folder: where its data and its log go.
        extra: further arguments.
        scheme: ``http`` or ``https``, for its clients.
    """

    def __init__(self, name: str, folder: Path, extra: Sequence[str] = (), scheme: str = "http") -> None:
        self.name = name
        self.folder = folder
        self.endpoint = f"127.0.0.1:{free_port()}"
        self.peer_url = f"http://127.0.0.1:{free_port()}"
        self.cluster = f"{name}={self.peer_url}"
        self._extra = extra
        self._scheme = scheme
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log_path(self) -> Path:
        """Its log."""
        return self.folder / f"{self.name}.log"

    def start(self) -> None:
        """Start it; it is ready when its cluster has a majority."""
        url = f"{self._scheme}://{self.endpoint}"
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    tool("etcd", "etcd-server"),
                    f"--name={self.name}",
                    f"--data-dir={self.folder / self.name}",
                    f"--listen-client-urls={url}",
                    f"--advertise-client-urls={url}",
                    f"--listen-peer-urls={self.peer_url}",
                    f"--initial-advertise-peer-urls={self.peer_url}",
                    f"--initial-cluster={self.cluster}",
                    "--heartbeat-interval=50",
                    "--election-timeout=500",
                    "--log-level=warn",
                    "--logger=zap",
                    *self._extra,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {"ETCD_UNSUPPORTED_ARCH": os.uname().machine},
            )

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process is not None
        return self._process.pid

    @property
    def runs(self) -> bool:
        """Whether it was started and has not been killed."""
        return self._process is not None

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class Cluster:
    """Several members.

    Args:
        folder: where their data and logs go; memory is faster than a disk, and no less real here.
        size: how many.
        extra: further arguments of each.
        scheme: ``http`` or ``https``, for their clients.
    """

    def __init__(self, folder: Path, size: int = 1, extra: Sequence[str] = (), scheme: str = "http") -> None:
        self.members = [Member(f"etcd-{number}", folder, extra, scheme) for number in range(size)]
        whole = ",".join(member.cluster for member in self.members)
        for member in self.members:
            member.cluster = whole

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Where its members are reached."""
        return tuple(member.endpoint for member in self.members)

    def state(self, prefix: str) -> str:
        """The value of ``--state``."""
        return f"etcd://{','.join(self.endpoints)}/{prefix}"

    def __enter__(self) -> "Cluster":
        for member in self.members:
            member.start()
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            member.kill()

    def wait(self) -> None:
        """Wait until every member that runs knows a leader."""
        for member in self.members:
            if member.runs:
                until(lambda member=member: self._leader(member) != 0, f"{member.name} has no leader")  # type: ignore[misc]

    def leader(self) -> Member:
        """The member that leads."""
        self.wait()
        ids = {self._own(member): member for member in self.members if member.runs}
        return ids[self._leader(next(member for member in self.members if member.runs))]

    @staticmethod
    def _status(member: Member) -> etcd_pb2.StatusResponse | None:
        with grpc.insecure_channel(member.endpoint) as channel:
            call = channel.unary_unary(
                STATUS.path,
                etcd_pb2.StatusRequest.SerializeToString,
                etcd_pb2.StatusResponse.FromString,
            )
            try:
                answer = call(etcd_pb2.StatusRequest(), timeout=2)
            except grpc.RpcError:
                return None
            assert isinstance(answer, etcd_pb2.StatusResponse)
            return answer

    def _leader(self, member: Member) -> int:
        status = self._status(member)
        return 0 if status is None else status.leader

    def _own(self, member: Member) -> int:
        status = self._status(member)
        assert status is not None
        return status.header.member_id


@contextmanager
def cluster(size: int = 1, extra: Sequence[str] = ()) -> Iterator[Cluster]:
    """A cluster that is ready, with its data in memory where there is room for files in it."""
    memory = Path("/dev/shm")
    with (
        tempfile.TemporaryDirectory(prefix="muster-etcd-", dir=memory if memory.is_dir() else None) as folder,
        Cluster(Path(folder), size, extra) as members,
    ):
        members.wait()
        yield members


def compact(members: Cluster) -> None:
    """Forget the past of all keys, up to now, as ``etcdctl compact`` does."""
    endpoint = next(member.endpoint for member in members.members if member.runs)
    with grpc.insecure_channel(endpoint) as channel:
        look: Any = channel.unary_unary(
            RANGE.path, etcd_pb2.RangeRequest.SerializeToString, etcd_pb2.RangeResponse.FromString
        )
        revision = look(etcd_pb2.RangeRequest(key=b"a"), timeout=PATIENCE).header.revision
        forget: Any = channel.unary_unary("/etcdserverpb.KV/Compact")
        # CompactionRequest: revision = 1, physical = 2.
        forget(b"\x08" + _varint(revision) + b"\x10\x01", timeout=PATIENCE)


def _varint(number: int) -> bytes:
    data = b""
    while number > 127:
        data += bytes([number & 127 | 128])
        number >>= 7
    return data + bytes([number])

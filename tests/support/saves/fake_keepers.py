"""Keepers and a coordinator of local checkpoints for tests, in this process, behind real sockets."""

import base64
import fcntl
import json
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NoReturn

import grpc

from muster.checkpoint.committed import SaveAttempt
from muster.checkpoint.digest import digest_of
from muster.checkpoint.local_folder import NOTES, attempt_name
from muster.checkpoint.manifest import MANIFEST, Manifest
from muster.checkpoint.source import FolderSource
from muster.checkpoint.verification import verify
from muster.v1 import local_pb2 as pb
from muster.v1 import local_pb2_grpc
from muster.worker.saves.local.folder import LocalFolder
from tests.support.grpc_server import serving

RUN = "job"


class Cluster:
    """The nodes of a job, and what their keepers and its coordinator know."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.nodes: list[FakeKeeper] = []
        self.commits: dict[SaveAttempt, pb.LocalCheckpoint] = {}
        self.committed_by: dict[SaveAttempt, str] = {}
        self.decisions: dict[tuple[int, int], SaveAttempt | None] = {}
        """By generation and number."""
        self.shared: dict[SaveAttempt, str] = {}
        """What ranks have committed in shared storage, and where."""
        self.unsettled: list[pb.LocalCheckpoint] = []
        """What each permit names."""
        self.doubtful: list[pb.LocalCheckpoint] = []
        """What decisions name until the ranks say that it is absent."""
        self.recoveries: list[pb.RecoverRequest] = []
        self.refused: set[SaveAttempt] = set()
        """Not to be resumed from."""

    def node_of(self, rank: int) -> "FakeKeeper | None":
        return next((node for node in self.nodes if node.alive and rank in node.ranks), None)

    def find(self, attempt: SaveAttempt, name: str) -> Path | None:
        """A whole copy of a file."""
        for node in self.nodes:
            if node.alive and (path := node.whole(attempt, name)) is not None:
                return path
        return None

    def manifest(self, attempt: SaveAttempt) -> Manifest | None:
        """The manifest of a checkpoint; None if no node has it."""
        path = self.find(attempt, MANIFEST)
        return None if path is None else Manifest.decode(path.read_bytes())

    def is_whole(self, attempt: SaveAttempt) -> bool:
        manifest = self.manifest(attempt)
        return manifest is not None and all(self.find(attempt, name) is not None for name in manifest.files)

    def decide(self, generation: int, number: int) -> SaveAttempt | None:
        with self.lock:
            if (generation, number) not in self.decisions:
                whole = [
                    one for one in sorted(self.commits) if one not in self.refused and self.is_whole(one)
                ]
                self.decisions[generation, number] = whole[-1] if whole else None
            return self.decisions[generation, number]


class FakeKeeper:
    """A keeper that holds its folder's lock, and copies from the others' folders."""

    def __init__(self, cluster: Cluster, parent: Path) -> None:
        self.cluster = cluster
        self.folder = LocalFolder(parent, RUN)
        self.folder.make()
        self.id = f"keeper-{len(cluster.nodes)}"
        self.ranks: set[int] = set()
        self.attached: list[dict[str, Any]] = []
        self.answers: list[tuple[int, dict[str, Any]]] = []
        """What it says instead of carrying out the next requests."""
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.alive = False
        cluster.nodes.append(self)
        self.start()

    def start(self) -> "FakeKeeper":
        self._lock = os.open(self.folder.path / "keeper.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.token = os.urandom(8).hex()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )
        self._thread.start()
        url = f"http://127.0.0.1:{self._server.server_address[1]}"
        said = {"pid": os.getpid(), "url": url, "token": self.token, "id": self.id}
        (self.folder.path / "keeper.json").write_text(json.dumps(said))
        self.alive = True
        return self

    def stop(self) -> None:
        """End it; its folder stays."""
        if self.alive:
            self.alive = False
            self.ranks.clear()
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)

    def wipe(self) -> None:
        """Lose its disk."""
        for path in self.folder.path.glob("*-*"):
            shutil.rmtree(path)

    def whole(self, attempt: SaveAttempt, name: str) -> Path | None:
        """A verified file, if it is here."""
        made = self.cluster.commits.get(attempt)
        folder = self.folder.attempt(attempt)
        if made is None or not (folder / name).exists():
            return None
        if name == MANIFEST:
            whole = digest_of((folder / name).read_bytes()) == made.manifest_digest
        else:
            manifest = self.cluster.manifest(attempt)
            whole = manifest is not None and not any(
                one.damages for one in verify(FolderSource(folder), Manifest({name: manifest.files[name]}), 1)
            )
        return folder / name if whole else None

    # ------------------------------------------------------------------ requests

    def carry_out(self, path: str, said: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.asked.append((path, said))
        if self.answers and path != "/status":
            return self.answers.pop(0)
        with self.cluster.lock:
            match path:
                case "/attach":
                    self.ranks.add(said["rank"])
                    self.attached.append(said)
                    return 200, {"id": self.id}
                case "/take":
                    return self._take(said)
                case "/fetch":
                    return self._fetch(said)
                case _:
                    return 200, self._status()

    def _take(self, said: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        found = []
        for rank, note in said["notes"]:
            node = self.cluster.node_of(rank)
            if node is None:
                return 503, {"error": f"rank {rank} has no keeper"}
            path = node.folder.path / said["attempt"] / NOTES / note
            if not path.exists():
                return 404, {"error": f"{note} is not there"}
            found.append(base64.b64encode(path.read_bytes()).decode())
        return 200, {"notes": found}

    def _fetch(self, said: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        generation, number = said["attempt"].split("-")
        attempt = SaveAttempt(int(generation), int(number))
        name = said["name"]
        if (here := self.whole(attempt, name)) is not None:
            return 200, {"path": str(here)}
        there = self.cluster.find(attempt, name)
        if there is None:
            return 404, {"error": f"no keeper has {name} whole"}
        path = self.folder.attempt(attempt) / name
        path.parent.mkdir(exist_ok=True)
        shutil.copyfile(there, path)
        return 200, {"path": str(path)}

    def _status(self) -> dict[str, Any]:
        kept = [
            {"attempt": attempt_name(attempt), "step": one.step, "level": "local", "ranks": []}
            for attempt, one in self.cluster.commits.items()
            if self.folder.attempt(attempt).exists()
        ]
        return {"id": self.id, "used": 0, "quota": 0, "free": 0, "checkpoints": kept}


def _handler_of(keeper: FakeKeeper) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length", "0"))
            self._answer(json.loads(self.rfile.read(length)))

        def _answer(self, said: dict[str, Any]) -> None:
            if not keeper.alive:
                self.close_connection = True
                return
            status, answer = 401, {"error": "another token"}
            if self.headers.get("Authorization") == f"Bearer {keeper.token}":
                status, answer = keeper.carry_out(self.path, said)
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


class FakeLocalCheckpoints(local_pb2_grpc.LocalCheckpointServiceServicer):
    """The coordinator's service."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.fails: list[grpc.StatusCode] = []
        """How the next calls end."""
        self.requests: list[pb.LocalCheckpointServiceCommitRequest] = []

    def Keep(self, request: Any, context: Any) -> NoReturn:  # noqa: N802
        raise NotImplementedError

    Report = List = Permit = Keep

    def Commit(self, request: Any, context: Any) -> pb.LocalCheckpointServiceCommitResponse:  # noqa: N802
        self._fail(context)
        attempt = SaveAttempt(request.checkpoint.attempt.generation, request.checkpoint.attempt.number)
        self.requests.append(request)
        if not request.keeper_id:
            if request.persisted_as:
                self.cluster.shared[attempt] = request.persisted_as
            return pb.LocalCheckpointServiceCommitResponse(unsettled=self.cluster.unsettled)
        with self.cluster.lock:
            self.cluster.commits[attempt] = request.checkpoint
            self.cluster.committed_by[attempt] = request.keeper_id
        level = max(request.wait_for, pb.DURABILITY_LEVEL_LOCAL)
        return pb.LocalCheckpointServiceCommitResponse(level=level)

    def Recover(self, request: Any, context: Any) -> pb.RecoverResponse:  # noqa: N802
        self._fail(context)
        self.cluster.recoveries.append(request)
        if request.without_local:
            return pb.RecoverResponse(reason="the ranks asked for none")
        if self.cluster.doubtful and not request.absent:
            return pb.RecoverResponse(reason="it may be there", unsettled=self.cluster.doubtful)
        attempt = self.cluster.decide(request.generation, request.number)
        if attempt is None:
            return pb.RecoverResponse(reason="no local checkpoint is whole")
        return pb.RecoverResponse(checkpoint=self.cluster.commits[attempt], reason="whole")

    def _fail(self, context: Any) -> None:
        if self.fails:
            context.abort(self.fails.pop(0), "as the test says")


@contextmanager
def served(service: FakeLocalCheckpoints) -> Iterator[str]:
    """The endpoint at which it is served."""
    with serving(
        service, local_pb2_grpc.add_LocalCheckpointServiceServicer_to_server, threads=16
    ) as endpoint:
        yield endpoint

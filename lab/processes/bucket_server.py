"""A server that speaks S3, as a process of its own, and answers as badly as it is told.

python -m lab.processes.bucket_server PORT FAULTS
"""

import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from lab.patience import until
from lab.processes.coordinator import free_port

BUCKET = "checkpoints"
FAULTS = ("503", "cut before", "cut after", "slow")
"""What may become of a request: refused for now; not done, or done, without an answer; answered late."""
SLOW = 0.3
"""Seconds."""
EXPIRED = "EXPIRED"
"""Prefix of access keys that the server always calls expired."""
READER = "READER"
"""Prefix of access keys that may not write."""


class BucketServer:
    """The process.

    Args:
        folder: where its log goes.
    """

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"http://127.0.0.1:{free_port()}"
        self._faults = folder / "faults.json"
        self._log = folder / "bucket-server.log"
        self._plan: dict[str, Any] = {"odds": 0.0, "what": FAULTS, "expired": [EXPIRED]}
        self._tell()

    def __enter__(self) -> "BucketServer":
        port = self.endpoint.rpartition(":")[2]
        with self._log.open("wb") as log:
            command = [sys.executable, "-m", "lab.processes.bucket_server", port, str(self._faults)]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        until(self._answers, lambda: f"it does not begin: {self._log.read_text()}")
        self.filesystem().mkdir(BUCKET)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def _answers(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(f"{self.endpoint}/moto-api/"):
            return True
        return False

    def spoil(self, odds: float, *what: str) -> None:
        """From now on so many of the requests meet one of these faults, drawn from the order they come in."""
        self._plan |= {"odds": odds, "what": what or FAULTS}
        self._tell()

    def expire(self, access_key: str) -> None:
        """From now on who comes with it, or one that begins so, is refused."""
        self._plan["expired"].append(access_key)
        self._tell()

    def _tell(self) -> None:
        written = self._faults.with_suffix(".new")
        written.write_text(json.dumps(self._plan))
        written.rename(self._faults)

    def environ(self, access_key: str = "anyone") -> dict[str, str]:
        """What finds the server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": access_key,
            "AWS_SECRET_ACCESS_KEY": "anything",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def options(self, access_key: str = "anyone") -> dict[str, Any]:
        """The same as ``storage_options``."""
        return {"endpoint_url": self.endpoint, "key": access_key, "secret": "anything"}

    def filesystem(self) -> Any:
        """Return fsspec's file system, without injected faults."""
        import s3fs

        return s3fs.S3FileSystem(**self.options(), use_listings_cache=False, skip_instance_cache=True)


class Faulty:
    """Answers for the server, or does not.

    Args:
        serve: the server, as WSGI has it.
        faults: the file that says how often something goes wrong, and what.
    """

    def __init__(self, serve: Callable[..., Iterable[bytes]], faults: Path) -> None:
        self._serve = serve
        self._faults = faults
        self._chance = random.Random(7)
        self._turn = threading.Lock()

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        said = environ.get("HTTP_AUTHORIZATION", "")
        plan = json.loads(self._faults.read_text())
        if any(f"Credential={key}" in said for key in plan["expired"]):
            return refused(
                environ, start, "400 Bad Request", "ExpiredToken", "The provided token has expired."
            )
        if f"Credential={READER}" in said and environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return refused(environ, start, "403 Forbidden", "AccessDenied", "Access Denied")
        fault = self._draw(**plan)
        if fault == "503":
            return refused(environ, start, "503 Slow Down", "SlowDown", "Please reduce your request rate.")
        if fault == "slow":
            time.sleep(SLOW)
        if fault == "cut before":
            return cut(environ)
        # Only all of it is an answer: the server does what it is asked for while it is read.
        answer = list(self._serve(environ, start))
        return cut(environ) if fault == "cut after" else answer

    def _draw(self, odds: float, what: list[str], **_: Any) -> str:
        with self._turn:
            return self._chance.choice(what) if self._chance.random() < odds else ""


def cut(environ: dict[str, Any]) -> NoReturn:
    """End the connection."""
    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    raise ConnectionAbortedError


def refused(
    environ: dict[str, Any], start: Callable[..., Any], status: str, code: str, why: str
) -> Iterable[bytes]:
    """S3's way to say no."""
    # What is left unread would reset the connection, and with it the answer.
    length = -1 if environ.get("wsgi.input_terminated") else int(environ.get("CONTENT_LENGTH") or 0)
    environ["wsgi.input"].read(length)
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{why}</Message></Error>".encode()
    start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
    return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]


def main() -> None:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    os.environ["MOTO_S3_DEFAULT_MAX_KEYS"] = "7"  # So that listings have several pages.
    port, faults = int(sys.argv[1]), Path(sys.argv[2])
    app = Faulty(DomainDispatcherApplication(create_backend_app), faults)
    make_server("127.0.0.1", port, app, threaded=True).serve_forever()


if __name__ == "__main__":
    main()

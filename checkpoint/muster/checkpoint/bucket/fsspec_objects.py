"""The objects of a job, in any store that fsspec supports."""

import errno
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from fsspec import AbstractFileSystem, available_protocols
from fsspec.core import url_to_fs

from muster.checkpoint.bucket import multipart
from muster.checkpoint.bucket.protocol import PROBE

T = TypeVar("T")

logger = logging.getLogger(__name__)

PROBES = 3
"""Attempts to see the store refuse a second object, before it counts as a store that does not."""
MAGIC = "*?[]"
"""Characters that fsspec takes for a pattern."""
UNKNOWN = (errno.ENOSYS, errno.EOPNOTSUPP)
"""Error numbers of a request that a store does not support."""
UNEXPLAINED = errno.EINVAL
"""The error number of a response without a reason: S3 answers HEAD so when a token has expired."""
FRESH: dict[str, Any] = {"use_listings_cache": False}
"""Options of every fsspec file system: listings are never cached."""


class FsspecObjects:
    """The objects below an address. Several threads may use it; a forked child opens the store again.

    Args:
        url: the address, with a scheme.
        options: options of fsspec's implementation of the scheme, such as credentials.

    Raises:
        ValueError: the scheme is unknown, or the address is incomplete.
        ImportError: the scheme's package is not installed.
        OSError: the store refuses the options.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self.url = url.rstrip("/")
        self.options = {**options, **FRESH}
        """The options with which other users of fsspec reach the same store."""
        self._opened_by = os.getpid()
        self._opened, self._root = _opened(self.url, self.options)
        self._exclusive = True
        self._warned = False

    # ------------------------------------------------------------------ checks

    def check(self) -> None:
        """Check that objects can be created, listed and removed, by doing so with one.

        Raises:
            OSError: they cannot; the message says why.
        """
        probe = f"{PROBE}{uuid4().hex}"
        self.put(probe, b"")
        seen = probe in self.names()
        self._ask("remove objects", lambda: self._fs.rm_file(self._path(probe)))  # Raises if it cannot.
        if not seen or probe in self.names():
            raise OSError(
                f"{self.url}: an object that was made there is {'not removed' if seen else 'not listed'}. "
                "Look at the address, and at what the credentials of this process allow."
            )

    def check_exclusive(self) -> bool:
        """Check whether the store refuses to create an object twice. If not, `create` first looks for it."""
        self._exclusive = True
        self._exclusive = any(self._refuses_a_second() for _ in range(PROBES))
        return self._exclusive

    def _refuses_a_second(self) -> bool:
        """Try to create an object twice. Success proves nothing: a sweep may have removed the first."""
        probe = f"{PROBE}{uuid4().hex}"
        try:
            # A refusal of the first counts as well: it was created, and the answer was lost.
            return not self.create(probe, b"") or not self.create(probe, b"")
        except OSError as error:
            if isinstance(error.__cause__, NotImplementedError) or _errno_of(error) in UNKNOWN:
                return False  # The store does not support the request.
            raise
        finally:
            self.remove([probe])

    # ------------------------------------------------------------------ requests

    def names(self) -> set[str]:
        """Return the names at the top level: objects, and folders, which end with ``/``."""

        def look() -> set[str]:
            try:
                found = self._fs.ls(self._root, detail=True)
            except FileNotFoundError:
                # An empty folder does not exist. If the bucket is missing, creating an object fails.
                return set()
            return {_top(one) for one in found}

        return self._ask("list objects", look)

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the objects in a folder and their sizes in bytes."""
        path = self._path(folder)

        def look() -> dict[str, int]:
            found = self._fs.find(path, detail=True)
            inside = {name.removeprefix(f"{path}/"): int(one["size"]) for name, one in found.items()}
            return {name: size for name, size in inside.items() if name not in ("", path)}

        return self._ask("list objects", look)

    def get(self, name: str) -> bytes:
        """Return the content of an object."""
        return self._ask(f"give {name}", lambda: bytes(self._fs.cat_file(self._path(name))))

    def get_range(self, name: str, offset: int, length: int) -> bytes:
        """Return up to ``length`` bytes of an object from an offset on; fewer only at its end."""
        path = self._path(name)

        def get() -> bytes:
            try:
                return bytes(self._fs.cat_file(path, start=offset, end=offset + length))
            except OSError as error:
                if error.errno != UNEXPLAINED and "range" not in str(error).lower():
                    raise
                # S3 refuses a range that begins at the object's end or behind it.
                if offset >= int(self._fs.info(path)["size"]):
                    return b""
                raise

        return self._ask(f"give {name}", get)

    def get_all(self, names: Iterable[str]) -> dict[str, bytes]:
        """Return the content of several objects, requested concurrently if the store supports it."""
        paths = {self._path(name): name for name in names}

        def get() -> dict[str, bytes]:
            found = self._fs.cat(list(paths), on_error="return") if paths else {}
            failed = [one for one in found.values() if isinstance(one, Exception)]
            for error in failed:
                if not isinstance(error, FileNotFoundError):
                    raise error
            return {paths[path]: one for path, one in found.items() if not isinstance(one, Exception)}

        return self._ask("give objects", get)

    def put(self, name: str, data: bytes) -> None:
        """Create or replace an object."""
        self._ask(f"take {name}", lambda: self._fs.pipe_file(self._path(name), data))

    def put_file(self, name: str, path: Path) -> None:
        """Create or replace an object with the content of a file."""
        self._ask(f"take {name}", lambda: self._fs.put_file(str(path), self._path(name)))

    def create(self, name: str, data: bytes) -> bool:
        """Create an object unless that name exists. Return whether it was created."""
        path = self._path(name)

        def make() -> bool:
            if not self._exclusive and self._exists(path):
                return False
            try:
                self._fs.pipe_file(path, data, mode="create" if self._exclusive else "overwrite")
            except FileExistsError:
                return False
            return True

        return self._ask(f"take {name}", make)

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects."""
        paths = [self._path(name) for name in names]

        def remove() -> None:
            try:
                self._fs.rm(paths)
            except FileNotFoundError:
                # One was gone already, and others may be left.
                for path in paths:
                    with suppress(FileNotFoundError):
                        self._fs.rm_file(path)

        if paths:
            self._ask("remove objects", remove)

    def uploads(self) -> set[str]:
        """Return the folders with multipart uploads that were not completed."""
        try:
            found = self._ask(
                "list its uploads", lambda: multipart.unfinished(self._fs, self._root), renews=False
            )
        except OSError as error:
            self._warn(error)
            return set()
        return {upload.path.removeprefix(f"{self._root}/").partition("/")[0] for upload in found}

    def abort_uploads(self, folder: str) -> None:
        """Abort the uploads of a folder."""
        try:
            self._ask("abort an upload", lambda: multipart.abort(self._fs, self._path(folder)), renews=False)
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        """Log once that uploads stay. They cost money, but do no harm."""
        if not self._warned:
            logger.warning("uploads that were never completed are not aborted: %s", error)
        self._warned = True

    # ------------------------------------------------------------------ fsspec

    @property
    def _fs(self) -> AbstractFileSystem:
        if self._opened_by != os.getpid():
            # A forked child does not have the thread and connections of its parent.
            self._opened_by = os.getpid()
            self._open()
        return self._opened

    def _exists(self, path: str) -> bool:
        """Return whether an object exists. ``exists`` of fsspec takes any error for absence."""
        try:
            self._fs.info(path)
        except FileNotFoundError:
            return False
        return True

    def _open(self) -> None:
        self._opened, _ = url_to_fs(self.url, **self.options)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _ask(self, what: str, request: Callable[[], T], *, renews: bool = True) -> T:
        try:
            return self._renewing(request) if renews else request()
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{self.url} cannot {what}: {error}. Is it there?") from error
        except PermissionError as error:
            raise PermissionError(
                f"{self.url} cannot {what}: {error}. Look at the credentials of this process: they must not "
                "have expired, and let it list, read, write and remove objects there."
            ) from error
        except Exception as error:
            # Each store's client has its own errors, which may not be OSErrors.
            raise OSError(f"{self.url} cannot {what}: {type(error).__name__}: {error}") from error

    def _renewing(self, request: Callable[[], T]) -> T:
        """Repeat a refused request once: a file of credentials may have been replaced since it was read."""
        try:
            return request()
        except OSError as error:
            if not (isinstance(error, PermissionError) or error.errno == UNEXPLAINED):
                raise
            # Torch's writers and readers get the same cached instance by the same options.
            type(self._fs).clear_instance_cache()
            self._open()
            return request()  # The refused request had no effect.


def _opened(url: str, options: Mapping[str, Any]) -> tuple[AbstractFileSystem, str]:
    scheme, _, name = url.partition("://")
    if not name:
        raise ValueError(f"{url} names no bucket. Name one: {scheme.rstrip(':/')}://BUCKET/JOB.")
    if "::" in url:
        raise ValueError(
            f"{url}: what stands between this and a store may show what was. Name the store alone."
        )
    if "//" in name or any(letter in MAGIC for letter in name):
        raise ValueError(
            f"{url}: the name of a place has no empty part, and none of {MAGIC}, which stand for others."
        )
    try:
        fs, root = url_to_fs(url, **options)
    except ImportError as error:
        raise ImportError(f"{url} needs a package for {scheme}:// that is not installed: {error}") from error
    except ValueError as error:
        known = ", ".join(sorted(available_protocols()))
        raise ValueError(f"{url} cannot be opened: {error}. fsspec knows: {known}.") from error
    except (TypeError, KeyError) as error:
        raise ValueError(
            f"{url} cannot be opened: an option is not what its store takes: {error}."
        ) from error
    return fs, root.rstrip("/")


def _errno_of(error: OSError) -> int | None:
    return getattr(error.__cause__, "errno", None)


def _top(found: Mapping[str, Any]) -> str:
    name = str(found["name"]).rstrip("/").rpartition("/")[2]
    return f"{name}/" if found["type"] == "directory" else name

"""A bucket whose objects are files, so that forked writers share it, and a test can damage what is in it."""

from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

SCHEME = "diskbucket"


class DiskBucket(LocalFileSystem):  # type: ignore[misc]
    """Objects are files, and folders are made with the first object in them."""

    protocol = (SCHEME,)

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"auto_mkdir": True, **options})

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(str(path).removeprefix(f"{SCHEME}://")))

    def unstrip_protocol(self, name: str) -> str:
        return f"{SCHEME}://{self._strip_protocol(name)}"


fsspec.register_implementation(SCHEME, DiskBucket, clobber=True)

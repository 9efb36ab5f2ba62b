"""Bytes in memory, as a transport streams those of another keeper."""

import io


class BytesStream:
    """Sends bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = io.BytesIO(data)

    def read_into(self, buffer: memoryview) -> int:
        return self._data.readinto(buffer)

    def close(self) -> None:
        pass

"""The HTTP client for a cloud's metadata server, which has a link-local address."""

from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp

from muster.watcher.polling import LookError
from muster.watcher.sources.reading import MAX_BYTES

TIMEOUT = 3.0
"""Seconds for one answer."""
OK = 200
UNAUTHORIZED = 401
NOT_FOUND = 404


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer that came in time and in full."""

    url: str
    status: int
    body: bytes
    flavor: str
    """Its header ``Metadata-Flavor``."""

    def found(self) -> bool:
        """Return whether the document is there.

        Raises:
            LookError: the status is neither 200 nor 404.
        """
        if self.status not in (OK, NOT_FOUND):
            raise LookError(f"{self.url} answers {self.status}.")
        return self.status == OK


class NoAnswerError(LookError):
    """The server did not answer in time."""


class MetadataServer:
    """Asks a metadata server. It never goes through a proxy, and follows no redirect.

    Args:
        base: its address, such as ``http://169.254.169.254``.
    """

    def __init__(self, base: str) -> None:
        self.base = base.rstrip("/")

    async def get(self, path: str, headers: Mapping[str, str], *, limit: float = TIMEOUT) -> Answer:
        """Ask for a document.

        Args:
            path: where it is, with its query.
            headers: those that the server wants.
            limit: seconds for the whole answer.

        Raises:
            LookError: there is no answer, or it is too large.
        """
        return await self._ask("GET", path, headers, limit)

    async def put(self, path: str, headers: Mapping[str, str]) -> Answer:
        """Send an empty PUT; otherwise as ``get``.

        Raises:
            LookError: as ``get`` does.
        """
        return await self._ask("PUT", path, headers, TIMEOUT)

    async def _ask(self, method: str, path: str, headers: Mapping[str, str], limit: float) -> Answer:
        url = self.base + path
        try:
            async with (
                # Without trust_env, HTTP_PROXY does not count. Nothing compressed: it could be of any size.
                aiohttp.ClientSession(
                    timeout=aiohttp.ClientTimeout(total=limit),
                    headers={"Accept-Encoding": "identity", **headers},
                    cookie_jar=aiohttp.DummyCookieJar(),
                    auto_decompress=False,
                    trust_env=False,
                ) as client,
                client.request(method, url, allow_redirects=False) as answer,
            ):
                return Answer(
                    url=url,
                    status=answer.status,
                    body=await _bounded(answer, url),
                    flavor=answer.headers.get("Metadata-Flavor", ""),
                )
        except TimeoutError:
            raise NoAnswerError(f"{url} did not answer within {limit:g} s.") from None
        except aiohttp.ClientConnectorError as error:
            raise LookError(
                f"{url} cannot be reached: {error.os_error.strerror or error.os_error}."
            ) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            message = str(error).rstrip(".") or type(error).__name__
            raise LookError(f"{url} cannot be read: {message}.") from None


async def _bounded(answer: aiohttp.ClientResponse, url: str) -> bytes:
    data = bytearray()
    async for chunk in answer.content.iter_any():
        data += chunk
        if len(data) > MAX_BYTES:
            raise LookError(f"{url} answers more than {MAX_BYTES:,} bytes.")
    return bytes(data)

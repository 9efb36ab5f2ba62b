"""The HTTP client that fetches an issuer's keys."""

import asyncio
import ssl

import aiohttp

from muster.service.security.files import FileError, read
from muster.service.security.identity.rules import FetchedFrom

TIMEOUT = 5.0
"""Seconds for one fetch."""
MAX_BYTES = 1_048_576


class FetchError(Exception):
    """The keys could not be fetched. The message says from where and why."""


async def fetch(source: FetchedFrom) -> bytes:
    """Fetch the key set.

    Raises:
        FetchError: it could not be fetched.
    """
    try:
        headers = _headers(source)
        # Reading the system's authorities takes a while.
        tls = await asyncio.to_thread(_tls, source)
        timeout = aiohttp.ClientTimeout(total=TIMEOUT)
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as client,
            # Our token must not follow a redirect.
            client.get(source.url, ssl=tls, allow_redirects=False) as answer,
        ):
            if answer.status != 200:
                raise FetchError(
                    f"{source.url} answers {answer.status} {answer.reason}{_advice(answer.status)}"
                )
            return await _bounded(answer, source.url)
    except TimeoutError:
        raise FetchError(f"{source.url} did not answer within {TIMEOUT:g} s") from None
    except (aiohttp.ClientError, OSError, ValueError, FileError) as error:
        raise FetchError(f"{source.url} cannot be reached: {str(error).rstrip('.')}") from None


async def _bounded(answer: aiohttp.ClientResponse, url: str) -> bytes:
    data = bytearray()
    async for chunk in answer.content.iter_any():
        data += chunk
        if len(data) > MAX_BYTES:
            raise FetchError(f"{url} answers more than {MAX_BYTES:,} bytes")
    return bytes(data)


def _headers(source: FetchedFrom) -> dict[str, str]:
    if source.token_file is None:
        return {}
    token = read(source.token_file).decode("ascii", "replace").strip()
    if not token or not token.isascii() or not token.isprintable():
        raise FileError(f"{source.token_file} holds no token: one line of ASCII.")
    return {"Authorization": f"Bearer {token}"}


def _tls(source: FetchedFrom) -> ssl.SSLContext:
    if source.ca_file is None:
        return ssl.create_default_context()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        # The file may have text in any language beside the certificates.
        context.load_verify_locations(cadata=read(source.ca_file).decode("ascii", "ignore"))
    except (OSError, ValueError) as error:
        raise FileError(f"{source.ca_file} holds no certificates in PEM: {error}.") from error
    return context


def _advice(status: int) -> str:
    if status in (401, 403):
        return ": is token_file given, and may its bearer read the keys (docs/security.md)?"
    return ""

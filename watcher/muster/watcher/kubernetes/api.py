"""The Kubernetes API, with objects as dicts."""

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias

import aiohttp
from kubernetes_asyncio import client, config
from kubernetes_asyncio.config import ConfigException

Manifest: TypeAlias = dict[str, Any]
"""An object of the API."""

ANSWER_TIMEOUT = 20.0
"""Seconds for a request other than a watch."""
CONNECT_TIMEOUT = 10.0
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""A silent connection is dropped after 25 s: an idle watch would not notice that its server has gone."""
MERGE_PATCH = "application/merge-patch+json"
APPLY = "application/apply-patch+yaml"
GONE = 410
UNAUTHORIZED = 401
NOT_ALLOWED = frozenset({UNAUTHORIZED, 403})


class KubernetesError(Exception):
    """A request failed. The message says why, for people.

    Args:
        message: what happened.
        status: of HTTP; 0: there was no answer.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class ConfigurationError(Exception):
    """There is no way to the API server. The message says why."""


class Api:
    """A connection to the API server. Close it at the end.

    Args:
        configuration: of the library.
        renew: gets new credentials into it, after the server has refused those before.
    """

    def __init__(
        self, configuration: client.Configuration, renew: Callable[[], Awaitable[object]] | None = None
    ) -> None:
        self._client = client.ApiClient(configuration)
        self._renew = renew

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> Manifest:
        """Read an object, or a list.

        Args:
            path: such as ``/api/v1/nodes``.
            query: parameters.

        Raises:
            KubernetesError: the request failed.
        """
        return await self._answer("GET", path, query)

    async def merge(self, path: str, patch: Manifest) -> Manifest:
        """Change an object by a JSON merge patch.

        Raises:
            KubernetesError: the request failed.
        """
        return await self._answer("PATCH", path, None, patch)

    async def apply(self, path: str, manifest: Manifest, manager: str) -> Manifest:
        """Set fields of an object by a server-side apply. The fields of other managers stay.

        Args:
            path: of the object, or its status.
            manifest: the fields.
            manager: the name of their manager.

        Raises:
            KubernetesError: the request failed.
        """
        query = {"fieldManager": manager, "force": "true"}
        return await self._answer("PATCH", path, query, manifest, APPLY)

    async def watch(
        self, path: str, query: Mapping[str, str], seconds: int
    ) -> AsyncGenerator[Manifest, None]:
        """Yield the events of a watch until the server ends it.

        Args:
            path: of the collection.
            query: parameters, with the resource version to start from.
            seconds: after which the server ends the watch.

        Raises:
            KubernetesError: the watch failed; its status is 410 if the resource version is too old.
        """
        full = {**query, "watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(seconds)}
        timeout = aiohttp.ClientTimeout(
            total=None, connect=CONNECT_TIMEOUT, sock_connect=CONNECT_TIMEOUT, sock_read=seconds + 30
        )
        response = await self._request("GET", path, full, timeout)
        try:
            _keep_alive(response)
            while line := await response.content.readline():
                event: Manifest = json.loads(line)
                if not isinstance(event, dict):
                    raise ValueError("an event is not an object")
                if event.get("type") == "ERROR":
                    raise _status_error(event.get("object") or {})
                yield event
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise KubernetesError(f"the watch of {path} broke: {_words(error)}") from error
        finally:
            response.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def _answer(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: Manifest | None = None,
        content_type: str = MERGE_PATCH,
    ) -> Manifest:
        timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT)
        response = await self._request(method, path, query or {}, timeout, body, content_type)
        try:
            answer: Manifest = await response.json(content_type=None)
            return answer
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise KubernetesError(f"{method} {path}: {_words(error)}") from error
        finally:
            response.release()

    async def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        limits: aiohttp.ClientTimeout,
        body: Manifest | None = None,
        content_type: str = MERGE_PATCH,
    ) -> aiohttp.ClientResponse:
        """Make a request, and return the answer if it is a success."""
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = content_type
        try:
            response: aiohttp.ClientResponse = await self._client.call_api(
                path,
                method,
                query_params=list(query.items()),
                header_params=headers,
                body=body,
                auth_settings=["BearerToken"],
                _preload_content=False,
                _request_timeout=limits,
            )
        except (aiohttp.ClientError, TimeoutError, OSError, ConfigException) as error:
            raise KubernetesError(f"{method} {path}: {_words(error)}") from error
        if response.status < 300:
            return response
        try:
            status = json.loads(await response.read())
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            status = None
        finally:
            response.release()
        if response.status == UNAUTHORIZED and self._renew is not None:
            # For the next attempt: the token of a helper command is good for minutes.
            with suppress(ConfigException, aiohttp.ClientError, OSError, TimeoutError):
                await asyncio.wait_for(self._renew(), ANSWER_TIMEOUT)
        known = status if isinstance(status, dict) else {"message": response.reason}
        raise _status_error({**known, "code": response.status})


async def connect(kubeconfig: str = "") -> Api:
    """Connect to the API server.

    Args:
        kubeconfig: a file; empty: the service account of the pod that this process is in.

    Raises:
        ConfigurationError: neither can be used.
    """
    configuration = client.Configuration()

    async def load() -> None:
        await config.load_kube_config(kubeconfig, client_configuration=configuration)

    try:
        if kubeconfig:
            await load()
        else:
            config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    except (ConfigException, OSError) as error:
        where = f"the file {kubeconfig}" if kubeconfig else "the service account of this pod"
        raise ConfigurationError(f"{where} does not lead to an API server: {error}") from error
    return Api(configuration, load if kubeconfig else None)


def _status_error(status: Manifest) -> KubernetesError:
    code = int(status.get("code") or 0)
    return KubernetesError(str(status.get("message") or status.get("reason") or f"HTTP {code}"), code)


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


def _keep_alive(response: aiohttp.ClientResponse) -> None:
    connection = response.connection
    transport = connection.transport if connection is not None else None
    sock = transport.get_extra_info("socket") if transport is not None else None
    if sock is None:
        return  # The answer is complete already.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

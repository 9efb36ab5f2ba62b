"""The API server as a pod reaches it: by TLS, with the token and the authority of its service account."""

import json
import ssl
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from kubernetes_asyncio.config import incluster_config

from lab.authority import Authority
from lab.watching import kubernetes_api
from lab.watching.kubernetes_api import Asked, KubernetesApi, Refused, kubeconfig, node
from muster.watcher.kubernetes.api import ConfigurationError, KubernetesError, connect


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesApi]:
    """A server, and a pod's files and variables that lead to it."""
    authority = Authority(tmp_path)
    pair = authority.issue("api", "127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.cert, pair.key)
    (tmp_path / "token").write_text("of-the-account")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(authority.ca))
    with kubernetes_api.running(context) as server:
        server.put("nodes", node())
        where = urlsplit(server.url)
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", str(where.hostname))
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(where.port))
        yield server


async def test_pod_shows_the_token_of_its_account(api: KubernetesApi):
    client = await connect()
    try:
        found = await client.get("/api/v1/nodes", {"fieldSelector": "metadata.name=node-1"})
        assert [one["metadata"]["name"] for one in found["items"]] == ["node-1"]
        version = {"resourceVersion": found["metadata"]["resourceVersion"]}
        events = client.watch("/api/v1/nodes", version, 10)
        api.edit("nodes", "node-1", spec={"unschedulable": True})
        event = await anext(events)
        assert event["object"]["spec"] == {"unschedulable": True}
        await events.aclose()
        patched = await client.merge("/api/v1/nodes/node-1", {"metadata": {"annotations": {"a": "b"}}})
        assert patched["metadata"]["annotations"] == {"a": "b"}
    finally:
        await client.close()
    assert {(one.verb, one.token) for one in api.asked} == {
        (verb, "of-the-account") for verb in ("list", "watch", "patch")
    }


async def test_server_of_another_authority_is_not_believed(
    api: KubernetesApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "other").mkdir()
    other = Authority(tmp_path / "other", "other")
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(other.ca))
    client = await connect()
    with pytest.raises(KubernetesError, match="certificate"):
        await client.get("/api/v1/nodes")
    await client.close()
    assert api.asked == []


async def test_process_outside_of_a_pod_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigurationError, match="service account of this pod"):
        await connect()


async def test_refusal_has_the_words_of_the_server(api: KubernetesApi):
    api.allows = lambda _: False
    client = await connect()
    with pytest.raises(KubernetesError, match="nodes is forbidden") as caught:
        await client.get("/api/v1/nodes")
    assert caught.value.status == 403
    await client.close()


async def test_token_of_a_kubeconfig_that_is_refused_is_read_again(tmp_path: Path):
    """The helper commands of clouds give tokens that are good for 15 minutes."""
    wanted = "one"

    def allows(asked: Asked) -> bool:
        if asked.token != wanted:
            raise Refused(HTTPStatus.UNAUTHORIZED, "Unauthorized")
        return True

    with kubernetes_api.running() as server:
        server.allows = allows
        file = tmp_path / "kubeconfig"
        file.write_text(json.dumps(kubeconfig(server.url, wanted)))
        client = await connect(str(file))
        await client.get("/api/v1/nodes")
        wanted = "two"
        file.write_text(json.dumps(kubeconfig(server.url, wanted)))
        with pytest.raises(KubernetesError, match="Unauthorized"):
            await client.get("/api/v1/nodes")
        await client.get("/api/v1/nodes")
        await client.close()


async def test_event_that_is_no_object_breaks_the_watch(api: KubernetesApi, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(api, "events", lambda *_: iter([["ADDED"]]))
    client = await connect()
    with pytest.raises(KubernetesError, match="not an object"):
        await anext(client.watch("/api/v1/nodes", {"resourceVersion": "1"}, 10))
    await client.close()

"""Keepers with certificates serve one another over TLS, and nobody else."""

import os
import ssl
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from lab.authority import Authority, Pair
from lab.patience import PATIENCE
from tests.support.keeping.checkpoints import made_checkpoint
from tests.support.keeping.fake_service import TOKEN, FakeService
from tests.support.keeping.nodes import Nodes, order


def _environment(authority: Authority, pair: Pair) -> dict[str, str]:
    return {
        **os.environ,
        "MUSTER_TLS_CA": str(authority.ca),
        "MUSTER_TLS_CERT": str(pair.cert),
        "MUSTER_TLS_KEY": str(pair.key),
    }


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def service(tmp_path: Path, authority: Authority):
    with FakeService(tls=(authority, authority.issue("coordinator"))) as running:
        yield running


def _get(url: str, ca: Path, pair: Pair | None) -> bytes:
    context = ssl.create_default_context(cafile=str(ca))
    context.check_hostname = False
    if pair is not None:
        context.load_cert_chain(pair.cert, pair.key)
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request, timeout=PATIENCE, context=context) as answer:
        return bytes(answer.read())


def test_keepers_with_certificates_copy_over_tls(
    nodes: Nodes, service: FakeService, authority: Authority, tmp_path: Path
):
    a = nodes.add("a", ranks=[0], environment=_environment(authority, authority.issue("a", "node-a")))
    b = nodes.add("b", ranks=[1], environment=_environment(authority, authority.issue("b", "node-b")))
    assert service.url(a.id).startswith("https://")
    made = made_checkpoint(size=70_000_000)
    made.write(a.folder, [0], head=True)
    service.push(a.id, order(made, [0]))
    service.push(b.id, order(made, [0], service.source(a.id, 0)))
    service.holds(b.id, made, [0])
    assert (b.folder / made.name / "__0_0.distcp").read_bytes() == made.files["__0_0.distcp"]
    url = f"{service.url(a.id)}/files/{made.name}/.metadata"
    assert _get(url, authority.ca, authority.issue("c")) == made.files[".metadata"]
    (tmp_path / "other").mkdir()
    stranger = Authority(tmp_path / "other", "stranger")
    for pair in (None, stranger.issue("d")):
        with pytest.raises((urllib.error.URLError, ssl.SSLError, ConnectionError)):
            _get(url, authority.ca, pair)


def test_keeper_with_an_unusable_certificate_says_so(nodes: Nodes, authority: Authority, tmp_path: Path):
    one, other = authority.issue("one"), authority.issue("other")
    environment = _environment(authority, Pair(one.cert, other.key))
    keeper = nodes.make("a", environment=environment)
    keeper.launch()
    assert keeper.ended() == 2
    assert "MUSTER_TLS_KEY" in keeper.log

"""TLS and mTLS, on the gRPC and on the HTTP port, with certificates of every bad kind."""

import queue
import re
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError

import grpc
import pytest
from typer.testing import CliRunner

import muster.worker
from lab.authority import Authority, Pair
from lab.patience import PATIENCE, until
from lab.processes.command import job
from lab.processes.command import muster as muster_command
from lab.processes.coordinator import Coordinator
from muster.service.cli.failure import Exit
from muster.service.cli.main import app
from muster.worker import ConnectError, CoordinatorStore, GrpcBarrier
from muster.worker.transport import outage_log

READY, FAILED = grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def authority(folder: Path) -> Authority:
    return Authority(folder)


@pytest.fixture(scope="module")
def stranger(folder: Path) -> Authority:
    return Authority(folder, "stranger")


def tls(pair: Pair, *more: str) -> tuple[str, ...]:
    return f"--tls-cert={pair.cert}", f"--tls-key={pair.key}", *more


@pytest.fixture(scope="module")
def mutual(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[Coordinator]:
    """Asks for client certificates, on both ports."""
    extra = tls(authority.issue("server"), f"--tls-client-ca={authority.ca}", "--http-tls")
    context = ssl.create_default_context(cafile=authority.ca)
    folder = tmp_path_factory.mktemp("mutual")
    with Coordinator(folder, state="memory:", extra=extra, https=context) as running:
        yield running
        muster.worker.close()


def present(environ: pytest.MonkeyPatch, ca: Path | None, client: Pair | None = None, name: str = "") -> None:
    for variable, value in {
        "MUSTER_TLS_CA": ca,
        "MUSTER_TLS_CERT": client and client.cert,
        "MUSTER_TLS_KEY": client and client.key,
        "MUSTER_TLS_SERVER_NAME": name,
    }.items():
        if value:
            environ.setenv(variable, str(value))


def get_runs(endpoint: str, *arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["get", "runs", "-e", endpoint, *arguments])
    return done.exit_code, done.stderr


def barrier(endpoint: str, **more) -> GrpcBarrier:
    return GrpcBarrier(0, 1, "p", endpoint, more.pop("init", 20), 20, run_id="tls", generation=0)


def assert_turned_away(endpoint: str, sentence: str) -> None:
    """SDK and command both say what is wrong."""

    def by_the_sdk() -> str:
        with pytest.raises(ConnectError) as caught:
            barrier(endpoint, init=0.5)
        return str(caught.value)

    # The session goes on meanwhile, and a busy machine may not have tried often enough at first.
    until(lambda: re.search(sentence, by_the_sdk()), by_the_sdk)
    code, said = get_runs(endpoint)
    assert code == Exit.UNREACHABLE
    assert re.search(sentence.replace("MUSTER_TLS_CA", "--tls-ca"), said), said
    assert "\n  next: " in said


def test_all_that_connects_goes_over_tls(
    mutual: Coordinator, authority: Authority, environ: pytest.MonkeyPatch
):
    present(environ, authority.ca, authority.issue("client", "node-0"))
    barrier(mutual.endpoint).execute_barrier()
    store = CoordinatorStore(mutual.endpoint, "tls")
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert get_runs(mutual.endpoint)[0] == 0


def test_the_commands_options_win_over_the_environment(
    mutual: Coordinator, authority: Authority, stranger: Authority, environ: pytest.MonkeyPatch
):
    client = authority.issue("client", "node-0")
    present(environ, stranger.ca, stranger.issue("other", "node-0"), "nowhere")
    options = [f"--tls-ca={authority.ca}", f"--tls-cert={client.cert}", f"--tls-key={client.key}"]
    assert get_runs(mutual.endpoint, *options, "--tls-server-name=localhost")[0] == 0


def test_no_client_certificate(mutual: Coordinator, authority: Authority, environ: pytest.MonkeyPatch):
    present(environ, authority.ca)
    assert_turned_away(mutual.endpoint, "may ask for a client certificate")


@pytest.mark.parametrize("kind", ["expired", "of another authority"])
def test_a_bad_client_certificate(
    mutual: Coordinator,
    authority: Authority,
    stranger: Authority,
    environ: pytest.MonkeyPatch,
    kind: str,
):
    bad = authority.issue("bad", "node-0", days=-1) if kind == "expired" else stranger.issue("bad", "node-0")
    present(environ, authority.ca, bad)
    assert_turned_away(mutual.endpoint, r"client certificate .*expired, or (be|is) of another authority")


def test_no_tls_where_tls_is_spoken(mutual: Coordinator, environ: pytest.MonkeyPatch):
    assert_turned_away(mutual.endpoint, "speaks TLS")


def test_the_servers_authority_is_unknown(
    mutual: Coordinator,
    authority: Authority,
    stranger: Authority,
    environ: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    environ.setattr(outage_log, "FIRST_REMINDER", 0.01)
    present(environ, stranger.ca, authority.issue("client", "node-0"))
    sentence = "certificate is not of an authority in MUSTER_TLS_CA"
    assert_turned_away(mutual.endpoint, sentence)
    # Nor does who waits for long wait without a word.
    lines = [record.getMessage() for record in caplog.records]
    assert any("trying again" in line and sentence in line for line in lines), lines


def test_client_with_tls_fails_at_a_coordinator_without(
    tmp_path: Path, authority: Authority, environ: pytest.MonkeyPatch
):
    present(environ, authority.ca)
    with Coordinator(tmp_path, state="memory:") as plain:
        assert_turned_away(plain.endpoint, "does not speak TLS on this port")


def test_the_servers_certificate_has_expired(
    tmp_path: Path, authority: Authority, environ: pytest.MonkeyPatch
):
    present(environ, authority.ca)
    with Coordinator(tmp_path, state="memory:", extra=tls(authority.issue("old", days=-1))) as old:
        assert_turned_away(old.endpoint, "certificate has expired")


def test_the_servers_certificate_is_for_another_name(
    tmp_path: Path, authority: Authority, environ: pytest.MonkeyPatch
):
    present(environ, authority.ca)
    extra = tls(authority.issue("named", "muster.example"))
    with Coordinator(tmp_path, state="memory:", extra=extra) as named:
        assert_turned_away(named.endpoint, "certificate is for another name than the endpoint's")
        present(environ, authority.ca, name="muster.example")
        barrier(named.endpoint).execute_barrier()
        assert get_runs(named.endpoint)[0] == 0


# ---------------------------------------------------------------------- the HTTP port


def asking(authority: Authority, client: Pair | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.ca)
    if client is not None:
        context.load_cert_chain(client.cert, client.key)
    return context


def test_http_asks_for_a_client_certificate_except_from_probes(
    mutual: Coordinator, authority: Authority, stranger: Authority
):
    for path in ("/healthz", "/readyz"):
        assert mutual.get(path) == (200, "ok\n")
    status, said = mutual.get("/metrics")
    assert status == 403
    assert "asks for a client certificate" in said
    assert mutual.get("/metrics", https=asking(authority, authority.issue("client", "node-0")))[0] == 200
    for bad in (stranger.issue("bad", "node-0"), authority.issue("bad", "node-0", days=-1)):
        with pytest.raises((URLError, OSError)):
            mutual.get("/healthz", https=asking(authority, bad))


# ---------------------------------------------------------------------- replaced while it runs


class Mounted:
    """Certificates as Kubernetes mounts them: files behind a symbolic link that is swapped."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._version = 0
        self.cert, self.key, self.ca = (folder / "data" / name for name in ("tls.crt", "tls.key", "ca.crt"))

    def put(self, cert: bytes, key: bytes, ca: bytes) -> None:
        self._version += 1
        version = self._folder / f"version-{self._version}"
        version.mkdir(parents=True)
        for path, data in ((self.cert, cert), (self.key, key), (self.ca, ca)):
            (version / path.name).write_bytes(data)
        fresh = self._folder / "fresh"
        fresh.symlink_to(version)
        fresh.replace(self._folder / "data")


def test_a_certificate_is_replaced_while_sessions_are_open(
    tmp_path: Path, authority: Authority, stranger: Authority
):
    mounted = Mounted(tmp_path)
    first, second = authority.issue("first", days=10), stranger.issue("second", days=20)
    old_client, new_client = authority.issue("old", "node-0"), stranger.issue("new", "node-0")
    mounted.put(first.cert.read_bytes(), first.key.read_bytes(), authority.ca.read_bytes())
    extra = (
        *(f"--tls-cert={mounted.cert}", f"--tls-key={mounted.key}", f"--tls-client-ca={mounted.ca}"),
        "--http-tls",
    )
    context = asking(authority, old_client)

    def expiry(context: ssl.SSLContext) -> float:
        text = coordinator.get("/metrics", https=context)[1]
        found = re.search(r"^muster_tls_certificate_expiry_timestamp_seconds (\S+)$", text, re.MULTILINE)
        assert found
        return float(found[1])

    def connected(ca: Authority, client: Pair) -> grpc.Channel:
        credentials = grpc.ssl_channel_credentials(
            ca.ca.read_bytes(), client.key.read_bytes(), client.cert.read_bytes()
        )
        options = [("grpc.use_local_subchannel_pool", 1)]
        return grpc.secure_channel(coordinator.endpoint, credentials, options=options)

    def reachable(ca: Authority, client: Pair) -> bool:
        states: queue.SimpleQueue[grpc.ChannelConnectivity] = queue.SimpleQueue()
        with connected(ca, client) as fresh:
            fresh.subscribe(states.put, try_to_connect=True)
            while (state := states.get(timeout=PATIENCE)) not in (READY, FAILED):
                pass
        return state is READY

    with Coordinator(tmp_path, state="memory:", extra=extra, https=context) as coordinator:
        before = expiry(context)
        with job(coordinator, connected(authority, old_client)) as running:
            mounted.put(second.cert.read_bytes(), second.key.read_bytes(), stranger.ca.read_bytes())
            coordinator.logged("certificate.reloaded")
            # New connections meet the new certificate, and its authority's clients.
            assert reachable(stranger, new_client)
            assert not reachable(authority, old_client)
            assert not reachable(stranger, old_client)
            renewed = asking(stranger, new_client)
            assert expiry(renewed) == pytest.approx(before + 10 * 86_400, abs=60)
            # Then a broken one comes.
            mounted.put(first.cert.read_bytes(), b"no key", stranger.ca.read_bytes())
            (kept,) = coordinator.logged("certificate.kept")
            assert kept["level"] == "error"
            assert "is not the key of the certificate in" in kept["reason"]
            assert reachable(stranger, new_client)
            # The earlier clients have noticed nothing.
            running.arrive(1, [3])
            assert "RELEASED" in str(running.decision())


def test_a_store_takes_new_certificates_when_its_connection_breaks(
    tmp_path: Path, authority: Authority, stranger: Authority, environ: pytest.MonkeyPatch
):
    """Its channel lives as long as the process, which may be longer than any certificate."""
    served, held = Mounted(tmp_path / "served"), Mounted(tmp_path / "held")

    def issue(by: Authority, name: str) -> None:
        server, client = by.issue(f"server-{name}"), by.issue(f"client-{name}", "node-0")
        served.put(server.cert.read_bytes(), server.key.read_bytes(), by.ca.read_bytes())
        held.put(client.cert.read_bytes(), client.key.read_bytes(), by.ca.read_bytes())

    issue(authority, "old")
    present(environ, held.ca, Pair(held.cert, held.key))
    extra = tls(Pair(served.cert, served.key), f"--tls-client-ca={served.ca}")
    with Coordinator(tmp_path, extra=extra) as coordinator:
        store, another = (CoordinatorStore(coordinator.endpoint, "tls") for _ in range(2))
        store.set("key", "old")
        waiting = threading.Thread(target=another.wait, args=(["later"],), daemon=True)
        waiting.start()
        issue(stranger, "new")
        coordinator.stop()
        coordinator.start()
        store.set("later", "new")
        waiting.join(PATIENCE)
        assert not waiting.is_alive()
        assert [another.get("key"), store.get("later")] == [b"old", b"new"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--tls-cert=/nowhere",), "give both --tls-cert and --tls-key"),
        (("--tls-client-ca=/nowhere",), "give both --tls-cert and --tls-key"),
        (("--http-tls",), "--http-tls needs a certificate"),
        (("--http-tokens",), "--http-tokens needs tokens"),
        (("--tls-cert=/nowhere", "--tls-key=/nowhere"), "/nowhere cannot be read"),
        (("--tokens-file=/nowhere",), "/nowhere cannot be read"),
    ],
)
def test_serve_refuses_security_options_that_contradict_each_other(arguments: tuple[str, ...], said: str):
    done = muster_command("", "serve", "--state=memory:", *arguments)
    assert done.returncode in (Exit.USAGE, Exit.FAILED)
    assert said in done.stderr

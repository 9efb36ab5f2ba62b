"""The tokens file: what it may say, and that no token leaves it."""

import hashlib
import hmac
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from muster.service.security import tokens
from muster.service.security.config import Security
from muster.service.security.context import SecurityContext
from muster.service.security.files import FileError
from muster.service.security.grants import Grant, Role
from muster.service.security.tokens import Tokens, bearer
from muster.v1 import coordinator_pb2

SECRET = "s3cr3t-0123456789-abcdef"
DIGEST = hashlib.sha256(SECRET.encode()).hexdigest()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tokens.toml"


def loaded(file: Path, text: str) -> Tokens:
    file.write_text(text)
    return tokens.load(file)


def test_token_is_found_by_its_text_or_by_its_digest(file: Path):
    for given in (f'token = "{SECRET}"', f'sha256 = "{DIGEST}"', f'sha256 = "{DIGEST.upper()}"'):
        known = loaded(file, f'[[token]]\nname = "ci"\nrole = "worker"\nruns = ["team-*", "x"]\n{given}\n')
        grant = known.find(SECRET)
        assert grant is not None
        assert (grant.name, grant.role, grant.runs) == ("ci", Role.WORKER, ("team-*", "x"))
        for other in ("", SECRET[:-1], f"{SECRET}x", DIGEST, "\udcff", "é"):
            assert known.find(other) is None


def test_every_token_is_looked_at(file: Path, monkeypatch: pytest.MonkeyPatch):
    tables = [f'[[token]]\nname = "{n}"\nrole = "viewer"\ntoken = "{SECRET}-{n}"\n' for n in range(5)]
    known = loaded(file, "".join(tables))
    compared: list[bytes] = []
    compare = hmac.compare_digest

    def counted(one: bytes, other: bytes) -> bool:
        compared.append(one)
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", counted)
    found = known.find(f"{SECRET}-0")
    assert found is not None
    assert found.name == "0"
    assert len(compared) == 5


@pytest.mark.parametrize(
    ("runs", "run_id", "allowed"),
    [
        (("*",), "anything", True),
        (("*",), "", True),
        (("a-*",), "a-1", True),
        (("a-*",), "A-1", False),
        (("a-*",), "ba-1", False),
        (("a-*",), "", False),
        (("a-?", "b"), "b", True),
        (("a-?", "b"), "a-12", False),
        (("a-[0-9]",), "a-7", True),
        (("a",), "a\nb", False),
    ],
)
def test_runs_are_glob_patterns(runs: tuple[str, ...], run_id: str, allowed: bool):
    grant = Grant(name="n", role=Role.VIEWER, runs=runs, digest=b"")
    assert grant.allows(run_id) is allowed
    assert grant.allows_all is (runs == ("*",))


def test_each_role_may_do_what_the_ones_before_it_may():
    assert Role.VIEWER < Role.WATCHER < Role.WORKER < Role.OPERATOR


def test_each_role_has_a_number_of_the_protocol():
    """The numbers that release 0.1.0 has stay, so that they do not order the roles."""
    assert {name.removeprefix("ROLE_") for name in coordinator_pb2.Role.keys()[1:]} == {*Role.__members__}
    numbers = [coordinator_pb2.Role.Value(f"ROLE_{role.name}") for role in Role]
    assert numbers == [1, 4, 2, 3]


ENTRY = f'[[token]]\nname = "n"\nrole = "viewer"\ntoken = "{SECRET}"\n'
WATCHER = ENTRY.replace("viewer", "watcher")


def test_watcher_is_for_its_nodes(file: Path):
    known = loaded(file, f'{WATCHER}runs = ["a-*"]\nnodes = ["node-1", "spot-*"]\n')
    (grant,) = known.grants
    assert (grant.role, grant.runs, grant.nodes) == (Role.WATCHER, ("a-*",), ("node-1", "spot-*"))
    again = loaded(file, f'{WATCHER}runs = ["a-*"]\nnodes = ["node-1", "spot-*"]\n')
    assert again.is_still_valid(grant)
    for nodes in ('["node-1"]', '["*"]', '["spot-*", "node-1"]'):
        changed = loaded(file, f'{WATCHER}runs = ["a-*"]\nnodes = {nodes}\n')
        assert not changed.is_still_valid(grant)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no [[token]] table"),
        ("token = 1", "must hold [[token]] tables"),
        ("[token]\nname = 'n'", "must hold [[token]] tables"),
        (f"{ENTRY}[other]\n", "must hold [[token]] tables"),
        (f'token = "{SECRET}', "is not TOML"),
        (ENTRY.replace('"n"', "7"), "token 1 needs a name"),
        (ENTRY.replace('"n"', r'"\u001b"'), "token 1 needs a name"),
        (
            ENTRY.replace("viewer", "admin"),
            'token 1 ("n") needs a role: one of viewer, watcher, worker, operator',
        ),
        (
            f'{ENTRY}nodes = ["node-1"]\n',
            'token 1 ("n"): nodes is for the role watcher, and its role is viewer',
        ),
        (f"{ENTRY}nodes = []\n", "nodes is for the role watcher"),
        (WATCHER, 'token 1 ("n") needs nodes: the names of the nodes that it may drain, or ["*"] for all'),
        (f"{WATCHER}nodes = []\n", 'nodes must be a list of patterns, such as ["gpu-*"]'),
        (f'{WATCHER}nodes = "{SECRET}"\n', "nodes must be a list of patterns"),
        (f'{WATCHER}nodes = [""]\n', "nodes must be a list of patterns"),
        (f'{WATCHER}nodes = ["a", "b\\n"]\n', "nodes must be a list of patterns"),
        (f"{WATCHER}nodes = [7]\n", "nodes must be a list of patterns"),
        (f"{ENTRY}runs = []\n", "runs must be a list of patterns"),
        (f'{ENTRY}runs = "a"\n', "runs must be a list of patterns"),
        (f'{ENTRY}sha256 = "{DIGEST}"\n', "needs either token or sha256"),
        (ENTRY.replace("token =", "#"), "needs either token or sha256"),
        (ENTRY.replace("token =", "sha256 ="), "sha256 must be 64 hexadecimal digits"),
        (ENTRY.replace(SECRET, "short"), "at least 16 ASCII characters"),
        (ENTRY.replace(SECRET, f"{SECRET} x"), "without spaces"),
        (ENTRY.replace("token =", f"{SECRET} ="), "1 unknown fields"),
        (ENTRY + ENTRY.replace(SECRET, f"{SECRET}-2"), '"n" and "n" have the same name'),
        (ENTRY + ENTRY.replace('"n"', '"m"'), '"n" and "m" have the same token'),
    ],
)
def test_file_that_cannot_be_meant_is_refused_without_saying_a_token(file: Path, text: str, said: str):
    with pytest.raises(FileError) as caught:
        loaded(file, text)
    assert said in str(caught.value)
    assert str(file) in str(caught.value)
    assert SECRET not in str(caught.value)
    assert "short" not in str(caught.value)


def test_file_that_is_not_there_or_not_text_is_refused(file: Path):
    with pytest.raises(FileError, match="cannot be read: No such file"):
        tokens.load(file)
    file.write_bytes(b"\xff")
    with pytest.raises(FileError, match="is not in UTF-8"):
        tokens.load(file)


def test_nothing_shows_a_token_or_its_digest(file: Path):
    known = loaded(file, ENTRY)
    for shown in (repr(known), str(known.grants[0])):
        assert SECRET not in shown
        assert DIGEST not in shown
        assert repr(bytes.fromhex(DIGEST)) not in shown


@pytest.mark.parametrize(
    ("header", "token"),
    [
        (f"Bearer {SECRET}", SECRET),
        (f"bearer   {SECRET} ", SECRET),
        (SECRET, None),
        ("Bearer", None),
        ("Bearer ", None),
        (f"Basic {SECRET}", None),
        ("", None),
    ],
)
def test_token_stands_in_the_header(header: str, token: str | None):
    assert bearer(header) == token


def test_workers_with_accidentally_overlapping_runs_are_named(file: Path):
    """A glob of one team's runs matches those of a team whose name begins with the same words."""
    tables = [
        f'[[token]]\nname = "{name}"\nrole = "{role}"\nruns = ["{runs}"]\ntoken = "{SECRET}-{name}"\n'
        for name, role, runs in (
            ("team-a", "worker", "team-a-*"),
            ("team-a-b", "worker", "team-a-b-*"),
            ("team-c", "worker", "team-c.*"),
            ("ann", "operator", "team-*"),
        )
    ]
    issuer = '[[issuer]]\nname = "cluster"\nurl = "https://issuer"\nkeys_file = "keys.json"\n'
    accounts = '[[service_account]]\nnamespace = "c"\naccount = "*"\nrole = "worker"\nruns = ["team-c.x*"]\n'
    first, second = loaded(file, "".join(tables) + issuer + accounts).overlaps()
    assert 'token "team-a" may touch runs of token "team-a-b": team-a-* and team-a-b-* may match' in first
    assert 'token "team-c" may touch runs of service accounts c/*: team-c.* and team-c.x*' in second


def test_overlap_is_logged_when_the_tokens_are_read(file: Path):
    file.write_text(
        "".join(
            f'[[token]]\nname = "{runs}"\nrole = "worker"\nruns = ["{runs}-*"]\ntoken = "{SECRET}-{runs}"\n'
            for runs in ("team-a", "team-a-b")
        )
    )
    with capture_logs() as logs:
        SecurityContext(Security(tokens_file=file))
    (warning,) = (line for line in logs if line["event"] == "tokens.overlap")
    assert (warning["log_level"], warning["others"]) == ("warning", 0)
    assert "team-a-* and team-a-b-*" in warning["reason"]

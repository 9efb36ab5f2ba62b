"""The tables of issuers in the tokens file, and the bearers that a rule covers."""

from pathlib import Path
from typing import Any

import pytest

from muster.service.security import tokens
from muster.service.security.claims import Claims, moment
from muster.service.security.files import FileError
from muster.service.security.grants import Role
from muster.service.security.identity.rules import FetchedFrom, Issuer, Login, ServiceAccounts

ISSUER = """[[issuer]]
name = "cluster"
url = "https://kubernetes.default.svc.cluster.local"
keys_url = "https://kubernetes.default.svc/openid/v1/jwks"
"""
ACCOUNT = """[[service_account]]
namespace = "team-a"
account = "*"
role = "worker"
runs = ["team-a-*"]
"""
WATCHER = ACCOUNT.replace("worker", "watcher")
LOGIN = """[[login]]
claims = { groups = "ml-operators" }
role = "operator"
"""


def loaded(folder: Path, text: str) -> tokens.Tokens:
    file = folder / "tokens.toml"
    file.write_text(text)
    return tokens.load(file)


def test_all_fields_are_read(tmp_path: Path):
    more = 'audience = "jobs"\nca_file = "/ca"\ntoken_file = "/token"\nleeway = 2\n'
    found = loaded(tmp_path, ISSUER + more + ACCOUNT + LOGIN)
    assert found.issuers == (
        Issuer(
            name="cluster",
            url="https://kubernetes.default.svc.cluster.local",
            audience="jobs",
            keys=FetchedFrom(
                url="https://kubernetes.default.svc/openid/v1/jwks",
                ca_file=Path("/ca"),
                token_file=Path("/token"),
            ),
            leeway=2.0,
        ),
    )
    assert found.rules == (
        ServiceAccounts(
            issuer="cluster", namespace="team-a", account="*", role=Role.WORKER, runs=("team-a-*",)
        ),
        Login(issuer="cluster", claims={"groups": "ml-operators"}, role=Role.OPERATOR, runs=("*",)),
    )


def test_keys_may_be_in_a_file_and_what_is_not_said_is_as_documented(tmp_path: Path):
    text = ISSUER.replace("keys_url", "keys_file").replace("https://kubernetes.default.svc/openid/v1/", "/")
    (issuer,) = loaded(tmp_path, text + ACCOUNT).issuers
    assert (issuer.keys, issuer.audience, issuer.leeway) == (Path("/jwks"), "muster", 10.0)


SECOND = ISSUER.replace("cluster", "second")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (ISSUER, "holds no [[token]] table, so nobody could call"),
        (ACCOUNT, "service_account 1 needs an [[issuer]] table"),
        (ISSUER + SECOND + ACCOUNT, "service_account 1 needs an issuer: one of cluster, second"),
        (ISSUER + ACCOUNT + 'issuer = "x"\n', "needs an issuer: one of cluster"),
        (ISSUER + ISSUER + ACCOUNT, 'the issuers "cluster" and "cluster" have the same name'),
        (
            ISSUER + ISSUER.replace('"cluster"', '"b"') + ACCOUNT + 'issuer = "b"\n',
            'the issuers "cluster" and "b" have the same url',
        ),
        (ISSUER.replace("name", "#"), "issuer 1 needs a name"),
        (ISSUER.replace("\nurl", "\n#"), 'issuer 1 ("cluster") needs url'),
        (ISSUER.replace("keys_url", "#"), "needs either keys_file or keys_url"),
        (ISSUER + 'keys_file = "x"\n', "needs either keys_file or keys_url"),
        (ISSUER.replace("keys_url", 'ca_file = "x"\nkeys_file'), "ca_file is for keys_url"),
        (ISSUER.replace("https://kubernetes.default.svc/", "http://other/"), "keys_url must be https"),
        (ISSUER.replace("https://kubernetes.default.svc/", "ftp://x/"), "keys_url must be such as"),
        (ISSUER.replace("https://kubernetes.default.svc/", "https://["), "keys_url must be such as"),
        (ISSUER + "leeway = -1\n", "leeway must be a number from 0 to 300"),
        (ISSUER + "leeway = true\n", "leeway must be a number"),
        (ISSUER + "leeway = nan\n", "leeway must be a number"),
        (ISSUER + "audience = 1\n", "audience must be printable text"),
        (ISSUER + "secret-0123 = 1\n", "1 unknown fields"),
        (ISSUER + ACCOUNT.replace("namespace", "#"), "service_account 1 needs namespace"),
        (ISSUER + ACCOUNT.replace("account =", "# ="), "service_account 1 needs account"),
        (
            ISSUER + ACCOUNT.replace('"worker"', '"king"'),
            "needs a role: one of viewer, watcher, worker, operator",
        ),
        (ISSUER + ACCOUNT + 'nodes = ["*"]\n', "nodes is for the role watcher, and its role is worker"),
        (ISSUER + WATCHER + "nodes = []\n", "service_account 1: nodes must be a list of patterns"),
        (ISSUER + LOGIN.replace('"operator"', '"watcher"'), "login 1 needs nodes: the names of the nodes"),
        (ISSUER + LOGIN + 'nodes = ["*"]\n', "nodes is for the role watcher, and its role is operator"),
        (ISSUER + ACCOUNT.replace('["team-a-*"]', "[]"), "runs must be a list of patterns"),
        (ISSUER + LOGIN.replace("claims", "#"), "login 1 needs claims: a table of texts"),
        (ISSUER + LOGIN.replace('{ groups = "ml-operators" }', "{}"), "login 1 needs claims"),
        (ISSUER + LOGIN.replace('"ml-operators"', "7"), "login 1 needs claims"),
    ],
)
def test_invalid_table_is_refused_by_its_name(tmp_path: Path, text: str, said: str):
    with pytest.raises(FileError) as caught:
        loaded(tmp_path, text)
    assert said in str(caught.value)
    assert "secret-0123" not in str(caught.value)


def claims(sub: str = "system:serviceaccount:team-a:trainer", **said: object) -> Claims:
    said = {"iss": "https://kubernetes.default.svc.cluster.local", "aud": "muster", "sub": sub, **said}
    return Claims(issuer="cluster", said=said, expires_at=0, ends_at=0)


@pytest.mark.parametrize(
    ("namespace", "account", "covered"),
    [
        ("team-a", "trainer", True),
        ("team-*", "*", True),
        ("*", "train*", True),
        ("team-b", "*", False),
        ("team-a", "train", False),
        ("Team-A", "trainer", False),
    ],
)
def test_namespace_and_account_are_patterns(namespace: str, account: str, covered: bool):
    rule = ServiceAccounts(
        issuer="cluster", namespace=namespace, account=account, role=Role.WORKER, runs=("*",)
    )
    assert rule.covers(claims()) is covered
    assert not rule.covers(claims("ann"))


@pytest.mark.parametrize(
    ("wanted", "said", "covered"),
    [
        ({"groups": "ops"}, {"groups": ["dev", "ops"]}, True),
        ({"groups": "ops"}, {"groups": "ops"}, True),
        ({"groups": "ops"}, {"groups": ["dev-ops"]}, False),
        ({"groups": "*"}, {"groups": ["ops"]}, False),
        ({"groups": "ops"}, {}, False),
        ({"sub": "ann"}, {}, True),
        ({"sub": "ann", "groups": "ops"}, {"groups": ["dev"]}, False),
        ({"email": "ann@x"}, {"email": "ann@x"}, True),
        ({"email": "ann@x"}, {"email": "ann@x", "email_verified": True}, True),
        ({"email": "ann@x"}, {"email": "ann@x", "email_verified": False}, False),
        ({"email": "ann@x"}, {"email": "ann@x", "email_verified": "true"}, False),
    ],
)
def test_login_must_hold_every_claim(wanted: dict[str, str], said: dict[str, object], covered: bool):
    rule = Login(issuer="cluster", claims=wanted, role=Role.VIEWER, runs=("*",))
    assert rule.covers(claims("ann", **said)) is covered


def bound(node: object) -> dict[str, Any]:
    """What Kubernetes says of the pod that a token was made for."""
    return {"kubernetes.io": {"namespace": "team-a", "node": node, "pod": {"name": "p", "uid": "1"}}}


@pytest.mark.parametrize(
    ("said", "node"),
    [
        (bound({"name": "node-1", "uid": "2"}), "node-1"),
        ({}, None),
        (bound(None), None),
        (bound({}), None),
        (bound("node-1"), None),
        (bound(["name"]), None),
        (bound({"name": 7}), None),
        (bound({"name": ""}), None),
        (bound({"name": ["node-1"]}), None),
        (bound({"name": "node-1\n"}), None),
        ({"kubernetes.io": "node-1"}, None),
        ({"kubernetes.io": None}, None),
        ({"node": {"name": "node-1"}}, None),
    ],
)
def test_node_is_the_one_of_the_pod(tmp_path: Path, said: dict[str, Any], node: str | None):
    known = loaded(tmp_path, ISSUER + WATCHER)
    mine = claims(**said)
    assert mine.node == node
    found = known.of(mine, b"")
    assert (found is None) is (node is None)
    assert known.rule_of(mine) is known.rules[0]
    if found is not None:
        assert (found.role, found.runs, found.nodes) == (Role.WATCHER, ("team-a-*",), ("node-1",))
        assert known.is_still_valid(found)
        assert not loaded(tmp_path, ISSUER + WATCHER + 'nodes = ["*"]\n').is_still_valid(found)


@pytest.mark.parametrize("name", ["*", "?", "node-[1]", "[!a]", "[*]", "a]b", "node-1"])
def test_node_of_a_token_is_no_pattern(tmp_path: Path, name: str):
    found = loaded(tmp_path, ISSUER + WATCHER).of(claims(**bound({"name": name})), b"")
    assert found is not None
    assert found.allows_node(name)
    for other in ("node-1", "b", "x", "!", "*", "[", "node-[1]"):
        assert found.allows_node(other) is (other == name)


def test_nodes_of_a_rule_win_over_the_node_of_the_token(tmp_path: Path):
    known = loaded(tmp_path, ISSUER + WATCHER + 'nodes = ["gpu-*"]\n')
    for said in (bound({"name": "node-1"}), {}):
        found = known.of(claims(**said), b"")
        assert found is not None
        assert found.nodes == ("gpu-*",)


def test_node_of_a_token_counts_for_watchers_alone(tmp_path: Path):
    found = loaded(tmp_path, ISSUER + ACCOUNT).of(claims(**bound({"name": "node-1"})), b"")
    assert found is not None
    assert (found.role, found.nodes) == (Role.WORKER, ())


def test_watcher_may_be_a_login_with_nodes(tmp_path: Path):
    text = LOGIN.replace('"operator"', '"watcher"\nnodes = ["gpu-*"]')
    found = loaded(tmp_path, ISSUER + text).of(
        claims("ann", groups="ml-operators", **bound({"name": "n"})), b""
    )
    assert found is not None
    assert (found.role, found.nodes) == (Role.WATCHER, ("gpu-*",))


def test_first_rule_that_is_about_the_bearer_counts(tmp_path: Path):
    known = loaded(
        tmp_path, ISSUER + ACCOUNT + ACCOUNT.replace('"*"', '"trainer"').replace("worker", "viewer")
    )
    found = known.of(claims(), b"")
    assert found is not None
    assert found.role is Role.WORKER


def test_names_are_fit_for_a_terminal():
    assert claims("a\x1b[2J").bearer == r"a\x1b[2J"
    assert moment(1e14) == "a time beyond the calendar"

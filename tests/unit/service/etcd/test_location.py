"""Where a state in etcd is."""

from pathlib import Path

import pytest

from muster.service.etcd.location import Access, Location


def test_several_members_and_a_prefix():
    location = Location.parse("etcd://a:2379,[::1]:2379,a:2379/team/muster")
    assert location.endpoints == ("a:2379", "[::1]:2379")
    assert location.prefix == b"/team/muster/"
    assert str(location) == "etcd://a:2379,[::1]:2379/team/muster"
    assert Location.parse(str(location)) == location


def test_no_prefix_begins_another():
    """Else one installation would read, and clear, the keys of the other."""
    one, other = Location.parse("etcd://a:1/m"), Location.parse("etcd://a:1/m2")
    assert not other.prefix.startswith(one.prefix)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("etcd://", "is not etcd://HOST:PORT"),
        ("etcd:///muster", "is not etcd://HOST:PORT"),
        ("http://a:1/muster", "is not etcd://HOST:PORT"),
        ("etcd://a/muster", '"a" is not HOST:PORT'),
        ("etcd://a:1,,b:1/muster", '"" is not HOST:PORT'),
        ("etcd://a:99999/muster", "is not HOST:PORT with a port"),
        ("etcd://a:1", "names no prefix"),
        ("etcd://a:1/", "such as etcd://a:1/muster"),
        ("etcd://a:1/\x00", "names no prefix"),
    ],
)
def test_other_locations_are_refused_with_a_sentence(text: str, why: str):
    with pytest.raises(ValueError) as caught:
        Location.parse(text)
    assert why in str(caught.value)


def test_password_is_not_repeated():
    with pytest.raises(ValueError) as caught:
        Location.parse("etcd://root:s3cret@a:1/muster")
    assert "--etcd-password-file" in str(caught.value)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"cert": Path("c")}, "both --etcd-cert and --etcd-key"),
        ({"key": Path("k")}, "both --etcd-cert and --etcd-key"),
        ({"cert": Path("c"), "key": Path("k")}, "without --etcd-ca"),
        ({"user": "muster"}, "both --etcd-user and --etcd-password-file"),
        ({"password_file": Path("p")}, "both --etcd-user and --etcd-password-file"),
    ],
)
def test_incomplete_pair_of_options_is_refused(given: dict[str, object], why: str):
    with pytest.raises(ValueError) as caught:
        Access(**given)  # type: ignore[arg-type]
    assert why in str(caught.value)

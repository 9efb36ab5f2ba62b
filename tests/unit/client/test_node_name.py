"""The name of a machine: which variable counts, and what a name is."""

import socket

import pytest

from muster.client.errors import EnvironmentValueError
from muster.client.node_name import host_name, node_name


def test_variables_count_in_their_order():
    environ = {"MUSTER_NODE_NAME": "ip-10-0-0-1.ec2.internal", "SLURMD_NODENAME": "n1"}
    assert node_name("pod-0", environ) == "ip-10-0-0-1.ec2.internal"
    assert node_name("pod-0", environ | {"MUSTER_NODE_NAME": ""}) == "n1"
    assert node_name("pod-0", {}) == "pod-0"


def test_host_name_counts_last(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-7")
    assert node_name(environ={}) == "gpu-7"
    monkeypatch.setattr(socket, "gethostname", lambda: "")
    assert host_name() == "unknown host"


@pytest.mark.parametrize("value", ["a\nb", "a\x1b[2J", "\udcff", "x" * 254, "\u00e9" * 127])
@pytest.mark.parametrize("variable", ["MUSTER_NODE_NAME", "SLURMD_NODENAME"])
def test_unusable_name_is_refused(variable: str, value: str):
    with pytest.raises(EnvironmentValueError, match=f"{variable} = .*printable.* 253 bytes") as caught:
        node_name("pod-0", {variable: value})
    assert str(caught.value).isprintable()


def test_longest_name_is_accepted():
    assert node_name("pod-0", {"MUSTER_NODE_NAME": "x" * 253}) == "x" * 253

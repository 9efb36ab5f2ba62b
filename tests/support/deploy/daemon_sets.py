"""What the charts' releases have in their DaemonSet: that of the relays, the watchers or the keepers."""

from typing import Any

from tests.support.deploy.helm import Manifest, Release


def pod_of(release: Release) -> Manifest:
    """The specification of its pods."""
    pod: Manifest = release.one("DaemonSet")["spec"]["template"]["spec"]
    return pod


def metadata_of(release: Release) -> Manifest:
    """The metadata of its pods."""
    metadata: Manifest = release.one("DaemonSet")["spec"]["template"]["metadata"]
    return metadata


def container_of(release: Release) -> Manifest:
    """The only container of a pod."""
    container: Manifest
    (container,) = pod_of(release)["containers"]
    return container


def environment_of(release: Release) -> dict[str, Any]:
    """The variables of the container: their values, or where those come from."""
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container_of(release)["env"]}


def probes_of(release: Release) -> dict[str, tuple[str, str]]:
    """The path and the scheme of each probe of the container."""
    probes = {name: one["httpGet"] for name, one in container_of(release).items() if name.endswith("Probe")}
    return {name: (one["path"], one["scheme"]) for name, one in probes.items()}


def let_in_by(release: Release) -> list[Manifest]:
    """The labels by which the network policy of the coordinators lets them in."""
    labels = metadata_of(release)["labels"]
    ports = {
        rule["ports"][0]["port"]: rule for rule in release.one("NetworkPolicy", "muster")["spec"]["ingress"]
    }
    peers = [one["podSelector"]["matchLabels"] for one in ports["grpc"]["from"] if "podSelector" in one]
    return [one for one in peers if one.items() <= labels.items()]

"""Finds the run that a pod trains in its manifest. It does no I/O."""

import re
from collections.abc import Iterator, Mapping

from muster.watcher.kubernetes.api import Manifest

LABEL = "muster.io/run-id"
"""A label or annotation of a pod that names its run; it wins over what the containers say."""
OPTION = re.compile(r"--rdzv[-_]id(?:=(?P<value>.*))?", re.DOTALL)
"""torchrun's option for the run."""
VARIABLES = ("MUSTER_RUN_ID", "PET_RDZV_ID")
"""Variables of a container that name its run; the second one is torchrun's."""
REFERENCE = re.compile(r"\$\$|\$\((?P<name>[^()]+)\)")
IN_METADATA = re.compile(r"metadata\.(?P<map>labels|annotations)\['(?P<key>[^']+)'\]")


def run_id_of(pod: Manifest) -> str:
    """Return the run that a pod trains; empty if its manifest does not say."""
    metadata = pod["metadata"]
    for kept in ("labels", "annotations"):
        if named := (metadata.get(kept) or {}).get(LABEL):
            return str(named)
    for container in (pod.get("spec") or {}).get("containers") or ():
        if named := next(_named_by(container, metadata), ""):
            return named
    return ""


def _named_by(container: Manifest, metadata: Manifest) -> Iterator[str]:
    variables = _variables(container, metadata)
    words = [*(container.get("command") or ()), *(container.get("args") or ())]
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if found := OPTION.fullmatch(word):
            value = found["value"] if found["value"] is not None else following
            if expanded := _expanded(value, variables):
                yield expanded
    yield from (variables[name] for name in VARIABLES if variables.get(name))


def _variables(container: Manifest, metadata: Manifest) -> dict[str, str]:
    """Return the environment variables of a container whose values are known."""
    found: dict[str, str] = {}
    for one in container.get("env") or ():
        field = (((one.get("valueFrom") or {}).get("fieldRef")) or {}).get("fieldPath", "")
        if "valueFrom" not in one:
            value = _expanded(one.get("value") or "", found)
        elif match := IN_METADATA.fullmatch(field):
            value = (metadata.get(match["map"]) or {}).get(match["key"])
        elif field in ("metadata.name", "metadata.namespace", "metadata.uid"):
            value = metadata.get(field.partition(".")[2])
        else:
            value = None
        if value is not None:
            found[one["name"]] = value
    return found


def _expanded(text: str, variables: Mapping[str, str]) -> str | None:
    """Replace ``$(NAME)`` as Kubernetes does; None: the value of one is unknown."""
    unknown = [
        found["name"]
        for found in REFERENCE.finditer(text)
        if found["name"] is not None and found["name"] not in variables
    ]
    if unknown:
        return None
    return REFERENCE.sub(lambda found: variables[found["name"]] if found["name"] else "$", text)

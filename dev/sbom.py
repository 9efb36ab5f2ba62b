#!/usr/bin/env python3
"""Writes a bill of materials (SBOM) of this interpreter's packages to stdout, in CycloneDX's JSON.

The image of the coordinator has one, made when it is built. What the base image holds is in the SBOM of that
image: its name, with the digest if it is pinned, is in BASE.

Usage: BASE=python:3.11 PYTHON dev/sbom.py
"""

import json
import os
import re
from importlib.metadata import Distribution, distributions

PROJECT = "muster-coordinator"


def component(found: Distribution) -> dict[str, object]:
    """Return the entry of a package."""
    name = re.sub(r"[-_.]+", "-", found.name).lower()
    purl = f"pkg:pypi/{name}@{found.version}"
    kind = "application" if name == PROJECT else "library"
    entry: dict[str, object] = {
        "type": kind,
        "bom-ref": purl,
        "name": name,
        "version": found.version,
        "purl": purl,
    }
    said = found.metadata.json
    if "license_expression" in said:
        entry["licenses"] = [{"expression": said["license_expression"]}]
    elif "\n" not in str(license := said.get("license", "\n")):
        entry["licenses"] = [{"license": {"name": license}}]
    return entry


def base(image: str) -> dict[str, object]:
    """Return the entry of the base image."""
    name, _, digest = image.partition("@")
    repository, _, tag = name.partition(":")
    entry: dict[str, object] = {"type": "container", "bom-ref": image, "name": repository, "version": tag}
    if digest.startswith("sha256:"):
        entry["hashes"] = [{"alg": "SHA-256", "content": digest.removeprefix("sha256:")}]
    return entry


def bill(image: str) -> dict[str, object]:
    """Return the bill: the same for the same packages.

    Args:
        image: the base image; empty: no base image.
    """
    packages = sorted((component(one) for one in distributions()), key=lambda one: str(one["bom-ref"]))
    (project,) = (one for one in packages if one["name"] == PROJECT)
    others = [one for one in packages if one is not project]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": project},
        "components": [*others, *([base(image)] if image else [])],
    }


if __name__ == "__main__":
    print(json.dumps(bill(os.environ.get("BASE", "")), indent=1, sort_keys=True))

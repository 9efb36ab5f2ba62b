#!/usr/bin/env bash
# Pins the base image of the Dockerfile by the digest that its tag has in the registry now. It needs docker with buildx,
# and the registry.
set -euo pipefail
cd "$(dirname "$0")/.."

tagged=$(sed -nE 's/^ARG PYTHON=([^@]+).*/\1/p' Dockerfile)
digest=$(docker buildx imagetools inspect --format '{{.Manifest.Digest}}' "$tagged")
[[ $digest =~ ^sha256:[0-9a-f]{64}$ ]] || { echo "dev/pin-base.sh: $tagged has no digest: $digest" >&2; exit 1; }
sed -i -E "s|^ARG PYTHON=.*|ARG PYTHON=$tagged@$digest|" Dockerfile
grep '^ARG PYTHON=' Dockerfile

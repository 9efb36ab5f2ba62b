#!/usr/bin/env bash
# Pins what the image is made of, with hashes: requirements/service.txt (what the coordinator runs on) and
# requirements/build.txt (what builds its wheel), at the versions of requirements/dev.txt, which the tests run on.
set -euo pipefail
cd "$(dirname "$0")/.."

tools=.tools/uv
test -x "$tools/bin/uv" || { python3 -m venv "$tools" && "$tools/bin/pip" install --quiet uv==0.13.9; }

compile() {
  "$tools/bin/uv" pip compile --quiet --upgrade --python-version 3.11 --constraint requirements/dev.txt \
    --generate-hashes --no-header --no-annotate --no-emit-index-url --no-emit-find-links "$@"
}

compile pyproject.toml --extra service --extra watch --output-file requirements/service.txt
python3 -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")' |
  compile - --output-file requirements/build.txt
sed -i '1i # Made by dev/pin-image.sh. What the image of the coordinator runs on.' requirements/service.txt
sed -i '1i # Made by dev/pin-image.sh. What builds the wheel in the image.' requirements/build.txt

#!/usr/bin/env bash
# Gives every pin of the development requirements the hashes of its release's files: change a version there, and run
# this. What the image is made of is pinned by dev/pin-image.sh.
set -euo pipefail
cd "$(dirname "$0")/.."

tools=.tools/uv
test -x "$tools/bin/uv" || { python3 -m venv "$tools" && "$tools/bin/pip" install --quiet uv==0.13.9; }

for file in requirements/{dev,bench,dist,docs,frameworks,frameworks-alone,peers,stubs}.txt; do
  python=3.11
  [ "$file" != requirements/docs.txt ] || python=3.12
  pins=$(mktemp)
  sed -nE 's/^([A-Za-z0-9][^ ]*==[^ \\]+).*/\1/p' "$file" >"$pins"
  grep '^#' "$file" | cat >"$pins.new"
  "$tools/bin/uv" pip compile --quiet --no-deps --python-version "$python" --generate-hashes --no-header --no-annotate \
    --no-emit-index-url --no-emit-find-links "$pins" >>"$pins.new"
  cat "$pins.new" >"$file"
  rm "$pins" "$pins.new"
done

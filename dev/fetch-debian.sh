#!/usr/bin/env bash
# Unpack Debian packages, and what they need and the machine lacks, into .tools/NAME; no root is needed.
#
# Usage: dev/fetch-debian.sh NAME [PACKAGE…]     (without packages, NAME is the package)
set -euo pipefail
cd "$(dirname "$0")/.."
name=$1
packages=("${@:2}")
[ "${#packages[@]}" -gt 0 ] || packages=("$name")
target=$PWD/.tools/$name
[ -e "$target/.fetched" ] && exit 0

state=$PWD/.tools/apt
options=(-o Debug::NoLocking=1 -o "Dir::Cache=$state/cache" -o APT::Sandbox::User=)

fetch() {
    local names
    names=$(apt-get "${options[@]}" --print-uris -y -qq --no-install-recommends install "${packages[@]}" |
        sed -nE "s/^'[^']*' ([^_]+)_[^ ]+\.deb .*/\1/p")
    # What the machine has already is not listed; the packages themselves are unpacked in any case.
    names=$(printf '%s\n' $names "${packages[@]}" | sort -u)
    mkdir -p "$state/debs/$name"
    (cd "$state/debs/$name" && apt-get "${options[@]}" -qq download $names)
}

mkdir -p "$state/cache/archives/partial" "$state/lists/partial"
if ! fetch 2>"$state/error"; then
    # The machine's own lists are missing or old, and only root could renew them.
    options+=(-o "Dir::State::lists=$state/lists")
    if ! { apt-get "${options[@]}" -qq update && fetch; } 2>>"$state/error"; then
        cat "$state/error" >&2
        echo "dev/fetch-debian.sh: cannot get the Debian packages ${packages[*]}. Install them with: apt-get install ${packages[*]}" >&2
        exit 1
    fi
fi
rm -rf "$target"
for deb in "$state/debs/$name"/*.deb; do
    dpkg -x "$deb" "$target"
done
rm -rf "$state/debs/$name"
touch "$target/.fetched"

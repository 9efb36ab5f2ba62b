#!/usr/bin/env bash
# Unpack a Debian package, and what it needs and the machine lacks, into .tools/PACKAGE; no root is needed.
#
# Usage: dev/fetch-debian.sh PACKAGE
set -euo pipefail
cd "$(dirname "$0")/.."
package=$1
target=$PWD/.tools/$package
[ -e "$target/.fetched" ] && exit 0

state=$PWD/.tools/apt
options=(-o Debug::NoLocking=1 -o "Dir::Cache=$state/cache" -o APT::Sandbox::User=)

fetch() {
    local names
    names=$(apt-get "${options[@]}" --print-uris -y -qq --no-install-recommends install "$package" |
        sed -nE "s/^'[^']*' ([^_]+)_[^ ]+\.deb .*/\1/p")
    # What the machine has already is not listed; the package itself is unpacked in any case.
    names=$(printf '%s\n' $names "$package" | sort -u)
    mkdir -p "$state/debs/$package"
    (cd "$state/debs/$package" && apt-get "${options[@]}" -qq download $names)
}

mkdir -p "$state/cache/archives/partial" "$state/lists/partial"
if ! fetch 2>"$state/error"; then
    # The machine's own lists are missing or old, and only root could renew them.
    options+=(-o "Dir::State::lists=$state/lists")
    if ! { apt-get "${options[@]}" -qq update && fetch; } 2>>"$state/error"; then
        cat "$state/error" >&2
        echo "dev/fetch-debian.sh: cannot get the Debian package $package. Install it with: apt-get install $package" >&2
        exit 1
    fi
fi
rm -rf "$target"
for deb in "$state/debs/$package"/*.deb; do
    dpkg -x "$deb" "$target"
done
rm -rf "$state/debs/$package"
touch "$target/.fetched"

#!/bin/sh
# Prints the folder of prometheus and promtool. Unpacks Debian's package into build/prometheus if there are none: nothing
# is installed, so no service starts and no rights are needed. Else says what is missing.
folder="$(dirname "$0")/../../build/prometheus"
find_it() { command -v prometheus || ls "$folder/usr/bin/prometheus" 2>/dev/null; }

found=$(find_it) && { dirname "$found"; exit 0; }
if command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null; then
  echo "==> unpacking Debian's prometheus (20 MB)" >&2
  mkdir -p "$folder" && cd "$folder" || exit 1
  folder=.
  { [ "$(id -u)" != 0 ] || apt-get update -qq
    apt-get download -qq prometheus && dpkg-deb -x prometheus_*.deb . && rm prometheus_*.deb; } >&2
  found=$(find_it) && { cd "$(dirname "$found")" && pwd; exit 0; }
fi
echo "There is no prometheus: install it (Debian: apt-get install prometheus)." >&2
exit 1

#!/bin/sh
# Prints the path of a chromium. Installs Debian's package if there is none, which root can do. Else says what is missing.
find_it() { command -v chromium || command -v chromium-browser || command -v google-chrome; }

[ -n "$CHROMIUM" ] && { echo "$CHROMIUM"; exit 0; }
find_it && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "==> installing chromium from Debian (100 MB)" >&2
  export DEBIAN_FRONTEND=noninteractive
  { apt-get update -qq && apt-get install -qq -y -o DPkg::Lock::Timeout=120 --no-install-recommends chromium fonts-liberation; } >&2 && find_it && exit 0
fi
echo "There is no chromium: install it (Debian: apt-get install chromium), or name one with CHROMIUM=PATH." >&2
exit 1

#!/usr/bin/env bash
# Say where a Chromium is, for the browser tests. On Debian as root it is installed first where there is none.
#
# Exit code: 0, or 1 with a sentence on stderr where there is none and it cannot be had.
set -euo pipefail

find_one() {
  local name
  for name in chromium chromium-browser google-chrome; do
    command -v "$name" && return 0
  done
  return 1
}

find_one && exit 0
if [[ $(id -u) != 0 ]] || ! command -v apt-get > /dev/null; then
  echo "there is no Chromium: install it (on Debian: apt-get install chromium)" >&2
  exit 1
fi
apt() {
  local log
  log=$(DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=300 "$@" 2>&1) ||
    { printf '%s\n' "$log" | tail -5 >&2; echo "apt-get $* failed, so there is no Chromium" >&2; exit 1; }
}
echo "chromium.sh: installing chromium" >&2
apt update
apt install -y --no-install-recommends chromium
find_one

#!/usr/bin/env bash
# Install what some tests need beside .venv, where this user may; say in one line each what cannot be had, and so is skipped.
set -uo pipefail
cd "$(dirname "$0")"

skip() { # WHAT WHY: one line, whatever a program has said
  printf 'make test: skipped: %s: %s\n' "$1" "$(tail -n 1 <<< "$2" | cut -c 1-160)"
}

ensure() { # WHAT COMMAND...
  local what=$1 said
  shift
  said=$("$@" 2>&1) || skip "$what" "$said"
}

namespaces() {
  [[ $(id -u) == 0 ]] || { echo "they are network namespaces, which only root can make"; return 1; }
  if ! command -v ip && command -v apt-get; then
    apt-get update -qq && apt-get install -y -qq --no-install-recommends iproute2
  fi
  unshare --net ip link
}

machine() { # what it boots is built once, and kept
  [[ $(id -u) == 0 ]] || { echo "only root can install QEMU, and read every file for its guest"; return 1; }
  rdma_guest/run.sh --build
}

another_user() { [[ $(id -u) == 0 ]] || { echo "only root can become another user"; return 1; }; }

ensure "tests over several hosts" namespaces
ensure "tests of RDMA cards, in a virtual machine that has one" machine
ensure "tests in a browser" browser/chromium.sh
ensure "tests against other users of this machine" another_user

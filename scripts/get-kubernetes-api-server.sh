#!/usr/bin/env bash
# get-kubernetes-api-server.sh [DIRECTORY]: Kubernetes's API server and etcd into out/kubernetes or DIRECTORY, for `make kubernetes`. etcd is
# Debian's package; the server (1.20, the newest whose whole source Debian has) is built from Debian's source with Debian's Go, which
# takes ten minutes of a core. Nothing is installed. KUBEBUILDER_ASSETS names a folder with another version.
set -euo pipefail
cd "$(dirname "$0")/.."
target=$(realpath --canonicalize-missing "${1:-out/kubernetes}")
if [ -x "$target/kube-apiserver" ] && [ -x "$target/etcd" ]; then exit 0; fi
work=$(mktemp -d)
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
mkdir "$work/home"
scripts/apt-of-release.sh "$work" bookworm deb deb-src
cd "$work"
export APT_CONFIG=$work/apt.conf
apt-get download -qq golang-1.19-go golang-1.19-src etcd-server rsync libpopt0 golang-github-modern-go-reflect2-dev
for package in *.deb; do dpkg-deb --extract "$package" "$work/root"; done
apt-get source -qq --download-only kubernetes
mkdir "$work/source"
tar --extract --file kubernetes_*.orig.tar.gz --directory "$work/source" --strip-components 1
cd "$work/source"
# The library that the source brings reads maps as Go before 1.18 laid them out: a server with it crashes at a custom resource.
reflect2=github.com/modern-go/reflect2
rm vendor/$reflect2/*.go vendor/$reflect2/*.s
cp "$work/root/usr/share/gocode/src/$reflect2"/*.{go,s} vendor/$reflect2/
mkdir -p .go/src/k8s.io
ln -s ../../.. .go/src/k8s.io/kubernetes
export HOME=$work/home GOROOT=$work/root/usr/lib/go-1.19 GOPATH=$work/source/.go CGO_ENABLED=0
export PATH=$GOROOT/bin:$work/root/usr/bin:$PATH
export LD_LIBRARY_PATH=$work/root/usr/lib/x86_64-linux-gnu${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} # rsync's
nice -n 19 make --silent WHAT=cmd/kube-apiserver
install -D -m 755 _output/bin/kube-apiserver "$target/kube-apiserver"
install -D -m 755 "$work/root/usr/bin/etcd" "$target/etcd"
echo "$target: $("$target/kube-apiserver" --version), etcd $("$target/etcd" --version | awk '{print $3; exit}')"

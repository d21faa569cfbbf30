#!/usr/bin/env bash
# Pods of a real Kubernetes API: ./tests/kubernetes/run.sh [CASE...]
#
# No part of the tests: it needs root, Debian 12 on x86_64 and its packages. kube-apiserver and
# kube-controller-manager are built from Debian's sources of Kubernetes, in some minutes, with
# Debian's Go; etcd is Debian's. All of it goes into a directory; nothing is installed. What is not
# there of a cluster is in cluster.py: nodes, and the operator itself, whose real definition of a
# MonarchMesh comes from its repository. Prints a transcript; ends with 0 if all is as it should be.
# WORK names a directory for what is built, which then stays; OPERATOR another place of the
# operator's repository.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
top=$(dirname "$(dirname "$here")")
work=${WORK:-$(mktemp -d /var/tmp/wheelmount-kubernetes-XXXXXX)}
operator=${OPERATOR:-https://github.com/meta-pytorch/monarch-kubernetes}
commit=12fda7907daea61555a33f78cc52814b2557437c
definition=operator/config/crd/bases/monarch.pytorch.org_monarchmeshes.yaml
began=$SECONDS
say() { echo "== $* ($((SECONDS - began)) s)"; }
[ -n "${WORK:-}" ] || trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/{debs,files,bin,sources}

[ -x "$top/.venv/bin/wheelmount" ] || "$top/examples/setup.sh" --dev >/dev/null
if [ ! -x "$work/files/usr/bin/etcd" ]; then
    apt-get -qq update
    (cd "$work/debs" && apt-get -qq download golang-1.19-go golang-1.19-src \
        golang-github-modern-go-reflect2-dev etcd-server 2>/dev/null)
    for package in "$work"/debs/*.deb; do dpkg -x "$package" "$work/files"; done
fi

build() { # PROGRAM PACKAGE [OPTION...]
    local program=$1 package=$2
    shift 2
    (cd "$source" && nice go build -tags providerless "$@" -o "$work/bin/$program" "$package")
}
export GOROOT=$work/files/usr/lib/go-1.19 GOPATH=$work/sources GOCACHE=$work/cache
export GO111MODULE=off CGO_ENABLED=0 PATH=$work/files/usr/lib/go-1.19/bin:$PATH
source=$work/sources/src/k8s.io/kubernetes
if [ ! -x "$work/bin/kube-controller-manager" ]; then
    rm -rf "$source"
    mkdir -p "$source" "$work/lists/partial"
    echo "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]" \
        "http://deb.debian.org/debian bookworm main" >"$work/sources.list"
    options=(-o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=-
        -o "Dir::State::lists=$work/lists" -o APT::Sandbox::User=root)
    apt-get -qq "${options[@]}" update
    (cd "$work/sources" && apt-get -qq "${options[@]}" source --download-only kubernetes)
    rmdir "$source"
    dpkg-source --no-check -x "$work"/sources/kubernetes_*.dsc "$source" >/dev/null 2>&1
    # The one that it brings does not build with this Go.
    rm -rf "$source/vendor/github.com/modern-go/reflect2"
    cp -r "$work/files/usr/share/gocode/src/github.com/modern-go/reflect2" \
        "$source/vendor/github.com/modern-go/reflect2"
    say "fetched: Kubernetes $(sed -n '/^Version: /{s///p;q}' "$work"/sources/kubernetes_*.dsc), $(go version | cut -d' ' -f3)"
    # What the API says of itself, which the sources lack.
    build openapi-gen ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
    packages=$(cd "$source" && grep -rl --include='*.go' -E '^// \+k8s:openapi-gen=true' pkg staging/src |
        xargs -n1 dirname | grep -vE '/(testdata|test|examples|_examples|sample-|code-generator)' |
        sed -e 's#^staging/src/#k8s.io/kubernetes/vendor/#' -e 's#^pkg/#k8s.io/kubernetes/pkg/#' | sort -u)
    (cd "$source" && "$work/bin/openapi-gen" -i "${packages//$'\n'/,}" -O zz_generated.openapi \
        -p k8s.io/kubernetes/pkg/generated/openapi -r /dev/null \
        -h hack/boilerplate/boilerplate.generatego.txt)
    version=k8s.io/kubernetes/vendor/k8s.io/component-base/version
    for program in kube-apiserver kube-controller-manager; do
        build $program ./cmd/$program \
            -ldflags "-s -w -X $version.gitVersion=v1.20.2 -X $version.gitMajor=1 -X $version.gitMinor=20"
    done
    rm -rf "$work/cache" "$work/sources"
fi
if [ ! -s "$work/definition.yaml" ]; then
    git init -q --bare "$work/operator"
    git -C "$work/operator" fetch -q --depth 1 "$operator" "$commit"
    git -C "$work/operator" show "$commit:$definition" >"$work/definition.yaml"
fi
say "built: $("$work/bin/kube-apiserver" --version), etcd $("$work/files/usr/bin/etcd" --version | sed -n 's/^etcd Version: //p')"

cd "$top"
rc=0
PATH=$top/.venv/bin:$work/bin:$work/files/usr/bin:$PATH python -m tests.kubernetes.check "$work/definition.yaml" "$@" || rc=$?
[ $rc = 0 ] && say "all as it should be" || say "NOT as it should be"
exit $rc

#!/usr/bin/env bash
# Bytes by RDMA between two emulated machines: ./tests/rdma/run.sh [CASE...]
#
# No part of the tests: it needs root, Debian 12 or later on x86_64, and its packages and PyPI. What
# it needs is installed first. The machines' network has a software device (rdma_rxe), which
# Monarch takes for one of Mellanox: see verbs.c. What this shows is that bytes are right, not how
# soon they come. Prints a transcript; ends with 0 if all that was asked for is as it should be.
# WORK names a directory for what is made; GUEST_MEMORY (MiB) and ACCEL (tcg, kvm) change machines.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
top=$(dirname "$(dirname "$here")")
cases=${*:-deliver refresh ahead second registrations large path mixed locked patterns loss dead}
work=${WORK:-$(mktemp -d /var/tmp/wheelmount-rdma-XXXXXX)}
limit=${LIMIT:-3600}
began=$SECONDS
say() { echo "== $* ($((SECONDS - began)) s)"; }

packages="qemu-system-x86 cpio kmod gcc libc6-dev libibverbs1 ibverbs-providers libibverbs-dev
    rdma-core busybox-static iproute2 fuse3"
# shellcheck disable=SC2086
if ! dpkg -s $packages >/dev/null 2>&1; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages >/dev/null
fi
[ -x "$top/.venv/bin/wheelmount" ] || "$top/examples/setup.sh" --dev >/dev/null
env -u PYTHONDONTWRITEBYTECODE "$top/.venv/bin/python" -m compileall -q "$top"/{wheelmount,benchmarks,tests/rdma}
python=$("$top/.venv/bin/python" -c 'import sys; print(sys.base_prefix)')
say "installed: $(qemu-system-x86_64 --version | sed -n '1s/ (.*//p'), $("$top/.venv/bin/pip" list 2>/dev/null | tr -s ' ' | grep -i '^torchmonarch')"

mkdir -p "$work/share" "$work/root"
gcc -Wall -O1 -shared -fPIC -o "$work/share/verbs.so" "$here/verbs.c" -ldl
if [ ! -e "$work/kernel" ]; then
    mkdir -p "$work/debs" "$work/files"
    kernel=$(apt-cache depends linux-image-amd64 | awk '/Depends:/ { print $2; exit }')
    (cd "$work/debs" && apt-get download -qq "$kernel" 2>/dev/null && dpkg -x ./*.deb ../files)
    version=$(ls "$work/files/lib/modules")
    depmod -b "$work/files" "$version"
    (cd "$work/root" && mkdir -p bin lib/modules proc sys dev usr share tmp run var/tmp etc root mnt)
    cp "$(command -v busybox)" "$work/root/bin/"
    for module in virtio_pci virtio_net 9pnet_virtio 9p overlay fuse crc32_generic crc32_pclmul \
        rdma_rxe ib_uverbs sch_ingress cls_u32 act_gact sch_netem; do
        modprobe -d "$work/files" -S "$version" --show-depends "$module" 2>/dev/null |
            awk '/^insmod/ { print $2 }'
    done | awk '!seen[$0]++' | while read -r file; do
        cp "$file" "$work/root/lib/modules/"
        basename "$file"
    done >"$work/root/modules"
    cp -r /etc/{passwd,group,nsswitch.conf,ld.so.conf,ld.so.conf.d,ld.so.cache,libibverbs.d} \
        "$work/root/etc/"
    echo "127.0.0.1 localhost" >"$work/root/etc/hosts"
    cp "$here/init" "$work/root/init"
    mkdir -p "$work/root$python" "$work/root$top"
    (cd "$work/root" && find . | cpio -o -H newc --quiet | gzip -1 >"$work/initramfs")
    cp "$work/files/boot/vmlinuz-$version" "$work/kernel"
fi
say "made: a machine with Linux $(ls "$work/files/lib/modules")"

boot() { # NAME ADDRESS NETWORK
    local shared=security_model=none
    exec timeout -k 5 "$limit" qemu-system-x86_64 -machine q35 -accel "${ACCEL:-tcg,thread=multi}" -cpu max \
        -smp "${GUEST_CORES:-1}" -m "${GUEST_MEMORY:-3072}" -nographic -no-reboot -nodefaults -serial stdio \
        -kernel "$work/kernel" -initrd "$work/initramfs" \
        -append "console=ttyS0 quiet mitigations=off no_timer_check panic=-1 NAME=$1 ADDRESS=$2 PYTHON=$python TOP=$top CASES=${cases// /,}" \
        -virtfs "local,path=/usr,mount_tag=usr,$shared,readonly=on" \
        -virtfs "local,path=$python,mount_tag=python,$shared,readonly=on" \
        -virtfs "local,path=$top,mount_tag=top,$shared,readonly=on" \
        -virtfs "local,path=$work/share,mount_tag=share,$shared" \
        -netdev "socket,id=net,$3" \
        -device "virtio-net-pci,netdev=net,romfile=,host_mtu=9000,rx_queue_size=1024,mac=52:54:00:00:00:0${2##*.}" \
        >"$work/$1.log" 2>&1 </dev/null
}
rm -rf "$work/share/state" && mkdir "$work/share/state"
: >"$work/share/transcript"
port=$((20000 + RANDOM % 10000))
boot client 10.9.0.1 "listen=127.0.0.1:$port" & client=$!
sleep 1
boot host 10.9.0.2 "connect=127.0.0.1:$port" & host=$!
tail -n +1 -f --pid=$client "$work/share/transcript" & shown=$!
stop() { kill $client $host $shown 2>/dev/null || true; [ -n "${WORK:-}" ] || rm -rf "$work"; }
trap stop EXIT
wait $client || true
sleep 1
if [ "$(cat "$work/share/state/result" 2>/dev/null)" = 0 ]; then
    say "all as it should be: $cases"
else
    say "NOT as it should be: $cases"
    tail -n 40 "$work/client.log" "$work/host.log"
    exit 1
fi

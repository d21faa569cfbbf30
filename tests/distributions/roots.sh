#!/usr/bin/env bash
# Install wheelmount on other distributions as an ordinary user, with their Python, and use it: packages
# on two hosts, a script with its packages, a mount. As root; needs mmdebstrap and a network. On two
# busy cores, a root directory took 2 to 7 minutes.
#
#   tests/distributions/roots.sh [--tests] [--quickstart] [NAME…]
#
#   NAME          debian-13 (Python 3.13), ubuntu-22.04 (3.10) or ubuntu-24.04 (3.12); all of them if
#                 none is given
#   --tests       then run the tests without hosts and mounts there, as root
#   --quickstart  on Debian 13 also examples/setup.sh as root, then examples/quickstart.sh as the user
#
# ROOTS=DIR keeps the root directories there for the next run. APPTAINER_DEB=file.deb: see
# wheelmount/containers/debian.py.
#
# uv's own Pythons come from GitHub, which not every network reaches; distributions have them too.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

tests=no quickstart=no names=()
for word; do
  case $word in
    --tests) tests=yes ;;
    --quickstart) quickstart=yes ;;
    debian-13 | ubuntu-22.04 | ubuntu-24.04) names+=("$word") ;;
    *) sed -n '2,17s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; [ "$word" = --help ]; exit ;;
  esac
done
[ ${#names[@]} -gt 0 ] || names=(debian-13 ubuntu-22.04 ubuntu-24.04)

say() { printf 'roots: %s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }
[ "$(id -u)" = 0 ] || die "run it as root"
command -v mmdebstrap >/dev/null || die "mmdebstrap is missing: apt-get install mmdebstrap"

place=$(mktemp -d)
trap 'rm -rf --one-file-system "$place"' EXIT
roots=${ROOTS:-$place/roots}
mkdir -p "$roots"

# --- root directories -----------------------------------------------------------------------------

packages=ca-certificates,fuse3,git,passwd,procps,python3,python3-venv,xz-utils

make_root() {
  local root=$roots/$1
  [ -e "$root/.complete" ] && return
  say "$1: making its root directory"
  case $1 in
    # Debian signs Ubuntu's keys.
    debian-13) bootstrap trixie "$root" --include=ubuntu-keyring http://deb.debian.org/debian ;;
    ubuntu-22.04) ubuntu jammy "$root" ;;
    ubuntu-24.04) ubuntu noble "$root" ;;
  esac
  ln -sf ../proc/self/mounts "$root/etc/mtab"  # fusermount3 unmounts only what it finds there
  useradd --root "$root" --create-home --shell /bin/bash user
  touch "$root/.complete"
}

ubuntu() {
  make_root debian-13
  bootstrap "$1" "$2" --components=main,universe \
    --keyring="$roots/debian-13/usr/share/keyrings/ubuntu-archive-keyring.gpg" \
    http://archive.ubuntu.com/ubuntu
}

bootstrap() {
  local suite=$1 root=$2 mirror=${!#}
  rm -rf --one-file-system "$root"
  mmdebstrap --quiet --variant=minbase --aptopt='APT::Install-Recommends "false"' \
    --include="$packages" "${@:3:$#-3}" "$suite" "$root" "$mirror"
}

# --- processes in them ----------------------------------------------------------------------------

# Run a script, given by standard input, as a user of a root directory. Its processes and mounts end
# with it. Not by chroot: the kernel allows no user namespaces there.
enter() {
  local root=$1 user=$2
  cp -L /etc/resolv.conf "$root/etc/resolv.conf"
  # A network may have an authority of its own.
  cp -L /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
  cat >"$root/script.sh"
  unshare --mount --uts --ipc --pid --fork --kill-child --propagation private -- \
    bash -euc '
      mount --bind "$1" "$1"
      cd "$1"
      mount --rbind /dev dev
      mount -t tmpfs -o mode=1777 tmpfs dev/shm
      mount -t tmpfs -o mode=1777 tmpfs tmp
      mount -t tmpfs -o mode=755 tmpfs run
      mount -t proc proc proc
      mount -t sysfs -o ro sysfs sys
      mkdir -p old
      pivot_root . old
      umount --lazy old
      exec setpriv --reuid "$2" --regid "$2" --init-groups --inh-caps=-all \
        env -i --chdir "$(getent passwd "$2" | cut -d: -f6)" HOME="$(getent passwd "$2" | cut -d: -f6)" \
        PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin USER="$2" LANG=C.UTF-8 \
        SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt PIP_CERT=/etc/ssl/certs/ca-certificates.crt \
        "${@:3}" bash -euo pipefail /script.sh
    ' bash "$root" "$user" "${settings[@]}" </dev/null
}

# The network's settings are this machine's.
settings=()
for name in {HTTP,HTTPS,ALL,NO}_PROXY {http,https,all,no}_proxy PIP_INDEX_URL UV_DEFAULT_INDEX; do
  [ -z "${!name:-}" ] || settings+=("$name=${!name}")
done

# --- what a user does -----------------------------------------------------------------------------

use() {
  enter "$1" user <<'SCRIPT'
rm -rf venv env-host0 env-host1 source
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check /dist/wheelmount-*.whl
export PATH=$HOME/venv/bin:$PATH
python --version
wheelmount --version
wheelmount setup --check || [ $? = 69 ]  # there is no apptainer
wheelmount doctor || true
wheelmount install requests --hosts local:2 --venv env
for host in 0 1; do env-host$host/bin/python -c 'import requests'; done
echo 'import requests; print("requests", requests.__version__)' >script.py
wheelmount run --hosts local:2 --with requests script.py | tee output
[ "$(grep -c '^requests ' output)" = 2 ]
mkdir source
echo one >source/file
wheelmount mount source '/tmp/mount-{host}' --hosts local:2
[ "$(cat /tmp/mount-host0/file /tmp/mount-host1/file)" = $'one\none' ]
echo two >source/file
wheelmount refresh source
[ "$(cat /tmp/mount-host0/file /tmp/mount-host1/file)" = $'two\ntwo' ]
wheelmount umount source
SCRIPT
}

# As root, as some tests become other users, and with all that these tests run.
run_tests() {
  enter "$1" root <<'SCRIPT'
apt-get -qq update
DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install >/dev/null \
  e2fsprogs fish gcc iproute2 libc6-dev libfuse3-dev lmod man-db openssh-client pkg-config \
  python3-dev tcsh
cd /home/user/checkout
python3 -m venv --clear .venv
export PATH=$PWD/.venv/bin:$PATH
pip install --quiet --disable-pip-version-check uv
uv --no-progress pip install --quiet --editable . --group dev --constraint requirements-dev.lock
pytest -n 2 -q -p no:cacheprovider -m 'not (fuse or hosts or containers or lab or network)'
SCRIPT
}

set_up() {
  [ -z "${APPTAINER_DEB:-}" ] || cp "$APPTAINER_DEB" "$1/apptainer.deb"
  enter "$1" root <<'SCRIPT'
[ ! -e /apptainer.deb ] || export APPTAINER_DEB=/apptainer.deb
/home/user/checkout/examples/setup.sh
rm -rf /home/user/checkout/.venv  # the user makes another
chown -R user:user /home/user/checkout
SCRIPT
  enter "$1" user <<'SCRIPT'
checkout/examples/quickstart.sh
SCRIPT
}

# --------------------------------------------------------------------------------------------------

say "building the wheel"
.venv/bin/uv build --quiet --wheel --out-dir "$place/dist" .
for name in "${names[@]}"; do
  root=$roots/$name
  make_root "$name"
  rm -rf "$root/dist" "$root/home/user/checkout"
  cp -r "$place/dist" "$root/dist"
  mkdir "$root/home/user/checkout"
  git ls-files -z | tar --create --null --files-from - | tar --extract -C "$root/home/user/checkout"
  say "$name: using it"
  use "$root"
  if [ $tests = yes ]; then
    say "$name: the tests without hosts and mounts"
    run_tests "$root"
  fi
  if [ $quickstart = yes ] && [ "$name" = debian-13 ]; then
    say "$name: examples/setup.sh as root, examples/quickstart.sh as user"
    set_up "$root"
  fi
  say "$name: passed"
done

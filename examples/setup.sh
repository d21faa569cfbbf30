#!/usr/bin/env bash
# Set this machine up for wheelmount: what it needs of Debian, apptainer, and .venv with the project.
#
#   examples/setup.sh          to use it
#   examples/setup.sh --dev    to work on it: also ruff, mypy, pytest, in the versions of
#                              requirements-dev.lock
#
# As root on Debian it installs what is missing, on a bare machine everything. As an
# ordinary user it says what is missing and makes .venv. What is there already is used as it is, so
# a second run takes a second. APPTAINER_DEB=file.deb: see wheelmount/containers/debian.py.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
PATH=$PATH:/usr/sbin:/sbin

dev=no
for option; do
  case $option in
    --dev) dev=yes ;;
    *) sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; [ "$option" = --help ]; exit ;;
  esac
done

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }
have() { command -v "$1" >/dev/null; }

# --- packages -------------------------------------------------------------------------------------

# Debian's Python first: one that was compiled on the machine, as by pyenv, is often built without
# profile-guided optimization, with which the tests take a fifth longer.
SYSTEM_PYTHON=/usr/bin/python3

# A Python that can make .venv: of the right version, with venv, and for --dev with the headers that
# pyfuse3 is compiled against. Of the given ones, if any are.
usable_python() {
  local name
  [ $# != 0 ] || set -- $SYSTEM_PYTHON python3 python3.13 python3.12 python3.11 python3.10
  for name; do
    if "$name" - $dev 2>/dev/null <<'PYTHON'
import ensurepip, os, sys, sysconfig, venv
header = os.path.join(sysconfig.get_path("include"), "Python.h")
compiles = sys.argv[1] == "no" or os.path.exists(header)
sys.exit(not ((3, 10) <= sys.version_info[:2] <= (3, 13) and compiles))
PYTHON
    then echo "$name"; return; fi
  done
  return 1
}

find_missing() {
  # Without the first there is no .venv. wheelmount/machine.py knows what mounts and containers need.
  needed=() wanted=() servers=()
  usable_python >/dev/null || needed+=(python3 python3-venv)
  [ $dev = no ] || ! have apt-get || usable_python $SYSTEM_PYTHON >/dev/null ||
    wanted+=(python3-venv python3-dev)
  [ $dev = no ] || find_compiler
  [ $dev = no ] || find_servers
  missing=("${needed[@]}" "${wanted[@]}" "${servers[@]}")
}

# What pyfuse3 is compiled with; the other packages come as wheels.
find_compiler() {
  have gcc && [ -e /usr/include/stdio.h ] || needed+=(gcc libc6-dev)
  have pkg-config || needed+=(pkg-config)
  { have pkg-config && pkg-config --exists fuse3; } || needed+=(libfuse3-dev)
  usable_python >/dev/null || needed+=(python3-dev)
}

# What tests run: on several hosts that they make on this machine (tests/testbed), and a registry.
find_servers() {
  { have ip && have tc; } || wanted+=(iproute2)
  { have pgrep && have pkill; } || wanted+=(procps)
  have sshd || servers+=(openssh-server)
  have ssh || wanted+=(openssh-client)
  have tcsh || wanted+=(tcsh)  # login shells that people have
  have fish || wanted+=(fish)
  have slurmctld || servers+=(slurmctld)
  have slurmd || servers+=(slurmd)
  have srun || servers+=(slurm-client)  # brings munge
  have munged || servers+=(munge)
  have slurmdbd || servers+=(slurmdbd)
  have mariadbd || servers+=(mariadb-server-core)
  have docker-registry || servers+=(docker-registry)
  have man || wanted+=(man-db)
  [ -e /usr/share/lmod/lmod/init/bash ] || wanted+=(lmod)
}

have_apptainer() { have apptainer || have singularity; }

install_missing() {
  have apt-get || die "not a Debian; install yourself: ${missing[*]}"
  say "installing ${missing[*]}"
  quietly apt-get -qq update
  [ ${#needed[@]} = 0 ] && [ ${#wanted[@]} = 0 ] || install_packages "${needed[@]}" "${wanted[@]}"
  [ ${#servers[@]} = 0 ] || install_servers
}

# Install servers that only tests use, on hosts of their own: Debian would start them here, now and
# whenever the machine starts.
install_servers() {
  policy=/usr/sbin/policy-rc.d
  if [ ! -e $policy ]; then
    trap 'rm -f $policy' EXIT
    printf '#!/bin/sh\nexit 101\n' >$policy
    chmod 755 $policy
  fi
  install_packages "${servers[@]}"
  ! have systemctl || systemctl disable --quiet "${servers[@]/openssh-server/ssh}" 2>/dev/null || true
}

install_packages() {
  DEBIAN_FRONTEND=noninteractive quietly apt-get -qq -y --no-install-recommends install "$@"
}

# Run a command; show what it printed only if it fails.
quietly() {
  local output
  output=$("$@" 2>&1) || { printf '%s\n' "$output" >&2; die "failed: $*"; }
}

# --- .venv ----------------------------------------------------------------------------------------

# Many virtual machines keep CAP_SYS_RESOURCE (bit 24) from root, and apptainer insists on it.
# wheelmount tells it not to; nothing is changed for others who use apptainer here.
note_capability() {
  local permitted
  permitted=$(sed -n 's/^CapPrm:\s*//p' /proc/self/status)
  if [ "$(id -u)" = 0 ] && ! ((0x$permitted >> 24 & 1)); then
    say "note: root lacks CAP_SYS_RESOURCE here; to use apptainer by hand:" \
      "export APPTAINER_DROP_CAPS=CAP_SYS_RESOURCE"
  fi
}

venv_works() {
  [ -x .venv/bin/python ] && (cd / && "$root/.venv/bin/python" -c '' 2>/dev/null)
}

# Whether .venv has this checkout installed, as this pyproject.toml wants it.
venv_fresh() {
  local stamp
  venv_works && stamp=$(cat .venv/setup-stamp 2>/dev/null) || return 1
  [[ $stamp == "$(wanted_stamp yes)" || ($dev == no && $stamp == "$(wanted_stamp no)") ]]
}

wanted_stamp() { echo "dev=$1 $root $(cat pyproject.toml requirements-dev.lock | sha256sum)"; }

make_venv() {
  local group=()
  say "installing wheelmount into .venv"
  venv_works || quietly "$(usable_python)" -m venv --clear .venv
  [ -x .venv/bin/uv ] || quietly .venv/bin/python -m pip install --disable-pip-version-check uv
  [ "$dev" = no ] || group=(--group dev --constraint requirements-dev.lock)
  # uv does not read pip's settings; a machine that has a mirror usually tells only pip.
  local index
  index=$(.venv/bin/python -m pip config get global.index-url 2>/dev/null || true)
  index=${PIP_INDEX_URL:-$index}
  if [ -n "$index" ]; then export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$index}; fi
  # Compiled now: a command starts several processes, each of which would do it again where the
  # environment says not to write what was compiled.
  quietly .venv/bin/uv --no-progress pip install --python .venv/bin/python --compile-bytecode \
    --editable . --group man "${group[@]}"
  # Where man looks when .venv/bin is on PATH.
  quietly .venv/bin/click-man wheelmount --target .venv/share/man/man1
  wanted_stamp "$dev" >.venv/setup-stamp
}

# --------------------------------------------------------------------------------------------------

find_missing
if [ "$(id -u)" = 0 ]; then
  [ ${#missing[@]} = 0 ] || install_missing
  "$(usable_python)" -m wheelmount.machine || true
elif [ ${#missing[@]} != 0 ]; then
  say "missing here: ${missing[*]}; root can install it: sudo examples/setup.sh"
  [ ${#needed[@]} = 0 ] || venv_works || die "without ${needed[*]} .venv cannot be made"
fi
if [ "$(id -u)" != 0 ] && python=$(usable_python); then
  "$python" -m wheelmount.machine --check || say "root can install it: sudo examples/setup.sh"
fi
if ! venv_fresh; then
  make_venv
  note_capability
fi
[ "$(id -u)" != 0 ] || have_apptainer || die "everything but apptainer is ready: mounts work, containers do not"
say "ready: . .venv/bin/activate"

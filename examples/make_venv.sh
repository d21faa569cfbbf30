#!/bin/bash
# Make a virtual environment with PyTorch for CPUs, to be mounted on hosts, or put more into it:
#
#   examples/make_venv.sh VENV [REQUIREMENT…]
#   wheelmount run VENV examples/run_import.sh
#
# PyTorch comes from its own index, whose builds for CPUs are without gigabytes for GPUs; or from a
# directory of wheels, if PIP_FIND_LINKS names one.
set -euo pipefail
venv=${1:?say where: make_venv.sh VENV [REQUIREMENT…]}
shift
uv=$(dirname "${BASH_SOURCE[0]}")/../.venv/bin/uv
[ -x "$uv" ] || uv=uv
[ -e "$venv/bin/python" ] || "$uv" venv --quiet --relocatable "$venv"
install=("$uv" pip install --quiet --python "$venv/bin/python")
if [ -n "${PIP_FIND_LINKS:-}" ]; then
  "${install[@]}" --no-index --no-deps --find-links "$PIP_FIND_LINKS" torch
  "${install[@]}" torch  # what it needs
else
  "${install[@]}" --index https://download.pytorch.org/whl/cpu torch
fi
[ $# = 0 ] || "${install[@]}" "$@"

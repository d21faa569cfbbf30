#!/usr/bin/env bash
# The tests without hosts and mounts, with the lowest versions of what wheelmount depends on, in an
# environment of its own that is deleted again.
#
#   tests/distributions/lowest.sh [PYTHON] [pytest arguments]     PYTHON: 3.10 to 3.13, 3.11 if not given
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=3.11
if [[ ${1:-} =~ ^3\.[0-9]+$ ]]; then python=$1; shift; fi

place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
uv=$PWD/.venv/bin/uv
"$uv" venv --quiet --seed --python "$python" "$place/venv"
into=(--quiet --python "$place/venv/bin/python")
"$uv" pip install "${into[@]}" --resolution lowest-direct --editable '.[pyfuse3]'
"$uv" pip list "${into[@]}" --exclude wheelmount --format freeze >"$place/lowest.txt"
# What tests themselves use, with everything else as it is.
"$uv" pip install "${into[@]}" --constraint "$place/lowest.txt" \
  hypothesis kubernetes pytest pytest-timeout pytest-xdist safetensors
PATH=$place/venv/bin:$PATH pytest -n 2 -p no:cacheprovider \
  -m "not (fuse or hosts or containers or lab or network)" "$@"

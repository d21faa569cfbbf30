#!/bin/bash
# Install from a mounted wheelhouse with plain pip, on every host, into a virtual environment of its
# own in the host's temporary directory:
#
#   wheelmount download requests -d WHEELS
#   wheelmount run WHEELS examples/run_cached_pip.sh requests
set -euo pipefail
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --no-index --find-links "${WHEELMOUNT_MOUNT:-.}" "$@"
"$venv/bin/pip" list --format freeze

#!/bin/bash
# Install from a mounted wheelhouse with plain pip, on every host, into a virtual environment of its
# own in the host's temporary directory:
#
#   wheelmount download requests -d WHEELS
#   wheelmount run WHEELS examples/run_cached_pip.sh requests
set -euo pipefail
exec 2>&1  # where bash says how long things took
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
TIMEFORMAT='environment %2R s'
time python3 -m venv "$venv"
TIMEFORMAT='install %2R s'
time "$venv/bin/pip" install --quiet --no-index --find-links "${WHEELMOUNT_MOUNT:-.}" "$@"
"$venv/bin/pip" list --format freeze

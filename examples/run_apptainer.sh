#!/bin/bash
# Install from mounted wheels in a container without network, started from a mounted image, on every
# host. DIRECTORY has both, `img.sif` and `packages/`:
#
#   wheelmount image build images/python.def DIRECTORY/img.sif
#   wheelmount download six -d DIRECTORY/packages
#   wheelmount run DIRECTORY examples/run_apptainer.sh six
#
# This is by hand what `wheelmount exec --packages DIRECTORY -- uv pip install six` does, which keeps
# what is installed and takes the best overlay of the host.
set -euo pipefail
exec 2>&1  # where bash says how long things took
here=${WHEELMOUNT_MOUNT:-$PWD}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
shut=(--containall --network none --workdir "$work" --writable-tmpfs --no-privs)
TIMEFORMAT='container %2R s'
time apptainer --quiet exec "${shut[@]}" --bind "$here/packages:/packages:ro" "$here/img.sif" \
  sh -c 'pip install --quiet --root-user-action ignore --no-index --find-links /packages "$@"
         pip list --format freeze; grep -c : /proc/net/dev' sh "$@"

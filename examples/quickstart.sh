#!/usr/bin/env bash
# The main job, from nothing: wheels downloaded once, mounted on two hosts, installed from the mount
# in an offline container on each, and used there.
#
#   examples/quickstart.sh [REQUIREMENT…]      default: requests numpy pandas
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

examples/setup.sh
export PATH="$PWD/.venv/bin:$PATH:/usr/sbin:/sbin"

[ $# -gt 0 ] || set -- requests numpy pandas
image=build/images/python.sif

wheelmount image build images/python.def "$image"
wheelmount install "$@" --hosts local:2 --image "$image" --overlay quickstart
wheelmount exec --hosts local:2 --image "$image" --overlay quickstart -- \
  python -c 'import pandas; print(pandas.__version__)'

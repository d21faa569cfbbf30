#!/usr/bin/env bash
# In the container, in JOB as prepare.sh made it: build the project, install it and what its tests
# need, all from /packages, and run the tests. Arguments go to pytest.
set -euo pipefail
mkdir /tmp/project
tar -xf "$WHEELMOUNT_MOUNT"/source/*.tar.gz -C /tmp/project --strip-components=1
cd /tmp/project
uv pip install --quiet . pytest
if python -c 'import socket; socket.create_connection(("1.1.1.1", 53), 1)' 2>/dev/null; then
  echo "there is a network in here" >&2
  exit 70
fi
exec python -m pytest -q -p no:cacheprovider "$@"

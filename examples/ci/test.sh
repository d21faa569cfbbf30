#!/usr/bin/env bash
# In the container, in JOB as prepare.sh made it: build the project, install it and what its tests
# need, all from /packages, and run the tests. Arguments go to pytest.
#
# On several hosts each runs its share of the tests. What `--collect '$WHEELMOUNT_OUTPUT' DIR` brings
# back to DIR/HOST: junit.xml, and coverage.xml where pytest-cov is among the requirements.
set -euo pipefail
left=${WHEELMOUNT_OUTPUT:-/tmp}
mkdir /tmp/project
tar -xf "$WHEELMOUNT_MOUNT"/source/*.tar.gz -C /tmp/project --strip-components=1
cd /tmp/project
uv pip install --quiet . -r "$WHEELMOUNT_MOUNT/requirements.txt"
if python -c 'import socket; socket.create_connection(("1.1.1.1", 53), 1)' 2>/dev/null; then
  echo "there is a network in here" >&2
  exit 70
fi
options=(-q -p no:cacheprovider "--junitxml=$left/junit.xml")
if python -c 'import pytest_cov' 2>/dev/null; then
  options+=(--cov "--cov-report=xml:$left/coverage.xml")
fi
if [ "$WHEELMOUNT_SIZE" -gt 1 ]; then
  python -m pytest -q -p no:cacheprovider --collect-only "$@" >/tmp/collected
  # Every so many of them, as tests of one file take alike.
  grep :: /tmp/collected | awk -v "n=$WHEELMOUNT_SIZE" -v "r=$WHEELMOUNT_RANK" 'NR % n == r' >/tmp/share
  [ -s /tmp/share ] || { echo "no test is left for this host"; exit 0; }
  set -- @/tmp/share
fi
exec python -m pytest "${options[@]}" "$@"

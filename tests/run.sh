#!/usr/bin/env bash
# Everything that is checked: set-up, lint, format, types, tests.
#
#   tests/run.sh [--fast] [pytest arguments]
#
# Two tests at a time, as many of them wait; -n0 for one. With --fast only those that need no
# FUSE, host, container, lab or network. They end after TESTS_TIMEOUT seconds at the latest (3000).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

examples/setup.sh --dev

# The project's own programs first; those of root, for users that have them elsewhere on PATH.
export PATH="$PWD/.venv/bin:$PATH:/usr/sbin:/sbin"
# What the user set for wheelmount or apptainer is not what is tested.
unset "${!WHEELMOUNT_@}" "${!APPTAINER_@}" "${!SINGULARITY_@}"
unset PYTHONDONTWRITEBYTECODE  # hundreds of processes would compile the same modules

ruff check .
ruff format --check .
mypy
# A process of tests that dies ends all: pytest-xdist would wait for the rest of its file for ever.
tests=(-n 2 --dist loadfile --max-worker-restart 0)
if [ "${1:-}" = --fast ]; then
  shift
  tests+=(-m "not (fuse or hosts or containers or lab or network)")
fi
# Not by exec: in a container the shell is the first process, and takes leave of orphans that end.
timeout --foreground --kill-after 60 "${TESTS_TIMEOUT:-3000}" pytest "${tests[@]}" "$@"

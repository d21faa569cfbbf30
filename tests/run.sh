#!/usr/bin/env bash
# Everything that is checked: set-up, lint, format, types, tests.
#
#   tests/run.sh [pytest arguments]
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
# Not by exec: in a container the shell is the first process, and takes leave of orphans that end.
pytest "$@"

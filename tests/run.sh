#!/usr/bin/env bash
# Everything that is checked: set-up, lint, format, types, tests.
#
#   tests/run.sh [--fast | --all] [--coverage] [pytest arguments]
#
# Three tests at a time, as many of them wait, and two of the fast ones; -n0 for one. They end after
# TESTS_TIMEOUT seconds at the latest (4500). Standard output is kept in build/tests.log.
#
# Up to three tests that failed are run twice more, alone. If they pass, the run does too: a race that
# one run in thousands loses does not hold up an unrelated change. Their first failure stays printed.
#
# Of the tests marked costly, which take most of the time, a quarter is run, chosen by the commit.
#
#   --all       all costly tests
#   --fast      only tests that need no FUSE, host, container, lab or network, and little time
#   --coverage  print which lines and branches ran, in all processes that load .venv's packages;
#               slower, so bounds of time may be missed. Processes that are killed are not counted.
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
tests=(-n 3 --dist loadfile --max-worker-restart 0)
program=(pytest)
share=(--share "$(git rev-parse HEAD 2>/dev/null || echo none)")
while :; do
  case ${1:-} in
    # Few of these wait; each process reads all tests first.
    --all) share=() ;;
    --fast) tests+=(-n 2 -m "not (fuse or hosts or containers or lab or network or slow)") ;;
    --coverage)
      program=(coverage run -m pytest)
      # Each process writes a file of its own, other users' too.
      mkdir -p build/coverage
      chmod 1777 build/coverage
      export COVERAGE_FILE=$PWD/build/coverage/data
      coverage erase ;;
    *) break ;;
  esac
  shift
done
# Not by exec: in a container the shell is the first process, and takes leave of orphans that end.
code=0
last=.pytest_cache/v/cache/lastfailed
rm -f "$last"
mkdir -p build
[ ! -t 1 ] || tests+=(--color yes)
timeout --foreground --kill-after 60 "${TESTS_TIMEOUT:-4500}" "${program[@]}" "${tests[@]}" "${share[@]}" "$@" |
  tee build/tests.log || code=${PIPESTATUS[0]}
failed=()
# Not if some tests did not run: their process crashed, or the first failure was to end the run.
if [ $code = 1 ] && ! grep -qE 'crashed while running|node down|!!!!' build/tests.log; then
  mapfile -t failed < <(python -c 'import json, sys; print(*json.load(sys.stdin), sep="\n")' <"$last")
fi
if [ ${#failed[@]} -gt 0 ] && [ ${#failed[@]} -le 3 ]; then
  code=0
  for _ in 1 2; do
    timeout --foreground --kill-after 60 1200 "${program[@]}" -v "${failed[@]}" || code=$?
  done
  again='passed twice alone, so it loses a race that is to be found'
  [ $code = 0 ] || again='failed again'
  printf "failed beside others; $again: %s\n" "${failed[@]}"
fi
if [ "${program[0]}" = coverage ]; then
  coverage combine --quiet
  coverage report --skip-covered --skip-empty --sort=cover
fi
exit $code

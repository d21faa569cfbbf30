#!/usr/bin/env bash
# What a test run without network needs, put into one directory on a machine that has the index:
#
#   JOB/source/       the project: a checkout as it is, or a source distribution of the index
#   JOB/packages/     wheels of the requirements: of the project, its tests, and what builds it
#   JOB/requirements.txt
#   JOB/img.sif       the image that it is tested in
#
#   examples/ci/prepare.sh JOB CHECKOUT REQUIREMENT…
#   examples/ci/prepare.sh JOB PROJECT==VERSION REQUIREMENT…
#
# A second run takes the project as it is now, and fetches only what is missing. IMAGE=file.sif takes
# that image instead of building images/ci.def; its Python has to be TARGET_PYTHON on
# TARGET_PLATFORM.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export PATH="$root/.venv/bin:$PATH:/usr/sbin:/sbin"
[ $# -ge 2 ] || { sed -n '2,14s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 64; }
job=$1 project=$2
shift 2

rm -rf "$job/source"
mkdir -p "$job/source"
if [ -d "$project" ]; then
  # With what was not committed, and with .git, of which some builds read their version.
  echo '*' >"$job/.gitignore"  # where the job directory lies in the checkout
  { git -C "$project" ls-files -z --cached --others --exclude-standard; printf '.git\0'; } |
    tar -C "$project" --null --ignore-failed-read --transform 'flags=rh;s,^,project/,' \
      -czf "$job/source/project.tar.gz" -T -
else
  # Its own source only: what pip builds its description with may be wheels.
  python -m pip download --quiet --no-deps --no-binary "${project%%[!A-Za-z0-9._-]*}" \
    --dest "$job/source" -- "$project"
fi
printf '%s\n' "$@" >"$job/requirements.txt"
wheelmount download "$@" -d "$job/packages" --quiet \
  --python-version "${TARGET_PYTHON:-3.11}" --platform "${TARGET_PLATFORM:-manylinux_2_36_x86_64}" >/dev/null

image=${IMAGE:-$root/build/images/ci.sif}
if [ -z "${IMAGE:-}" ]; then
  wheelmount image build "$root/images/python.def" "$root/build/images/python.sif"
  wheelmount image build "$root/images/ci.def" "$image"
fi
ln -f "$image" "$job/img.sif" 2>/dev/null || cp "$image" "$job/img.sif"

#!/usr/bin/env bash
# Run a project's test-suite in an offline container of every host, from a mounted wheelhouse.
#
#   examples/ci/run.sh [CHECKOUT|PROJECT==VERSION REQUIREMENT…]
#
# Default: pluggy's, with pytest, and what builds it. WHEELMOUNT_HOSTS says where, by default here;
# several hosts share the tests. Reports come to JOB-reports/HOST.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export PATH="$here/../../.venv/bin:$PATH:/usr/sbin:/sbin"
[ $# -gt 0 ] || set -- pluggy==1.6.0 pytest setuptools setuptools-scm
job=${JOB:-$here/../../build/ci-job}

"$here/prepare.sh" "$job" "$@"
trap 'wheelmount overlay rm ci-run >/dev/null 2>&1 || true' EXIT
wheelmount run --image "$job/img.sif" --overlay ci-run \
  --collect '$WHEELMOUNT_OUTPUT' "$job-reports" --overwrite "$job" "$here/test.sh"

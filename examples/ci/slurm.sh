#!/usr/bin/env bash
#SBATCH --job-name=offline-tests
#SBATCH --nodes=1
#SBATCH --cpus-per-task=2
#SBATCH --time=00:20:00
#
# A project's test-suite in a container without network, on a compute node that has none either.
# Once on a login node, then as often as wanted:
#
#   examples/ci/prepare.sh JOB CHECKOUT pytest setuptools setuptools-scm
#   sbatch --export=ALL,WHEELMOUNT=CHECKOUT,JOB=JOB examples/ci/slurm.sh
set -euo pipefail
export PATH="$WHEELMOUNT/.venv/bin:$PATH:/usr/sbin:/sbin"
# The node's own disk: shared home directories make slow overlays.
WHEELMOUNT_STATE_DIR=$(mktemp -d)
export WHEELMOUNT_STATE_DIR
trap 'rm -rf "$WHEELMOUNT_STATE_DIR"' EXIT
wheelmount run --image "$JOB/img.sif" --hosts local:1 "$JOB" "$WHEELMOUNT/examples/ci/test.sh"

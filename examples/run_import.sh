#!/bin/bash
# Time to import a module on every host, from a virtual environment that is mounted there:
#
#   wheelmount run VENV examples/run_import.sh [MODULE]        default: torch
#
# Where VENV is mounted elsewhere, its scripts must not name its own path: uv venv --relocatable.
set -euo pipefail
module=${1:-torch}
source "${WHEELMOUNT_MOUNT:-.}/bin/activate"
python - "$module" <<'END'
import importlib, sys, time
start = time.perf_counter()
module = importlib.import_module(sys.argv[1])
print(f"{sys.argv[1]} {module.__version__} from {module.__path__[0]}")
print(f"{time.perf_counter() - start:.2f} s")
END

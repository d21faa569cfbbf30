#!/bin/bash
# Time to read all files of a mounted directory once, in random order, on every host:
#
#   wheelmount run DIRECTORY examples/run_disk_time.sh
set -euo pipefail
cd "${WHEELMOUNT_MOUNT:-.}"
python3 - <<'END'
import os, random, time
files = [os.path.join(folder, name) for folder, _, names in os.walk(".") for name in names]
random.Random(123).shuffle(files)
start, size = time.perf_counter(), 0
for path in files:
    if os.path.isfile(path):
        with open(path, "rb") as file:
            while piece := file.read(1 << 20):
                size += len(piece)
seconds = time.perf_counter() - start
print(f"{len(files)} files, {size / 1e6:.1f} MB in {seconds:.2f} s, {size / 1e6 / seconds:.0f} MB/s")
END

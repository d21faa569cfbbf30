"""Programs whose output is read: what is kept of it, and what they are told."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from wheelmount import child
from wheelmount.hosts import runtime
from wheelmount.variables import CREDENTIALS, TLS

PEAK = """
import sys
from pathlib import Path
from wheelmount import child
line = "head -c 300000000 /dev/zero | tr '\\\\0' x"
done = child.run(["sh", "-c", f"echo begin; {line}; echo end; ({line}; echo end) >&2"], timeout=300)
assert done.stdout.startswith("begin\\nxxx"), done.stdout[:10]
assert done.stdout.endswith("xxxend\\n") and done.stderr.endswith("xxxend\\n")
assert not done.whole
(peak,) = [each for each in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in each]
print(int(peak.split()[1]) >> 10)
"""


@pytest.mark.slow
def test_a_line_without_end_takes_no_memory() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PEAK], capture_output=True, text=True, check=True, timeout=300
    )
    assert int(done.stdout) < 60, "MiB"


def test_what_is_printed_comes_whole_if_it_is_wanted() -> None:
    given = "".join(f"line {number} \u00e9\n" for number in range(400_000))
    done = child.run(["cat"], timeout=60, given=given, most=64 << 20)
    assert (done.code, done.stdout == given, done.stderr, done.whole) == (0, True, "", True)
    done = child.run(["sh", "-c", "exec <&-; echo no >&2; kill -9 $$"], timeout=60, given=given)
    assert (done.code, done.stdout, done.stderr) == (-9, "", "no\n")


def test_what_does_not_end_is_killed() -> None:
    started = time.monotonic()
    for script in ("exec sleep 60", "exec >&- 2>&-; exec sleep 60", "exec yes"):
        with pytest.raises(subprocess.TimeoutExpired):
            child.run(["sh", "-c", script], timeout=0.2)
    assert time.monotonic() - started < 50


@pytest.mark.slow
def test_what_a_program_has_started_is_killed_with_it(tmp_path: Path) -> None:
    """Builds of wheels run programs of their own."""
    file = tmp_path / "pid"
    script = f"(sleep 600 & echo $! >{file}.new; mv {file}.new {file}; wait) & wait"
    for timeout in (1, 10, 60):  # until it came that far on a busy machine
        with pytest.raises(subprocess.TimeoutExpired):
            child.run(["sh", "-c", script], timeout=timeout)
        if file.exists():
            break
    _, alive = psutil.wait_procs(_found(int(file.read_text())), timeout=60)
    assert alive == []


def _found(pid: int) -> list[psutil.Process]:
    try:
        return [psutil.Process(pid)]
    except psutil.NoSuchProcess:
        return []


def test_programs_are_not_told_what_is_monarchs(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {CREDENTIALS, *TLS, *runtime.SWITCHES, "HYPERACTOR_MESH_BOOTSTRAP_MODE"}
    for name in own:
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("MONARCH_OF_THE_USER", "kept")
    said = child.run(["env"], timeout=60).stdout
    assert not {line.partition("=")[0] for line in said.splitlines()} & own
    assert "MONARCH_OF_THE_USER=kept\n" in said


@pytest.mark.parametrize(("value", "kept"), [("0", False), ("1", True)])
def test_programs_get_the_backtraces_that_the_user_asked_for(
    monkeypatch: pytest.MonkeyPatch, value: str, kept: bool
) -> None:
    monkeypatch.setenv("RUST_LIB_BACKTRACE", value)  # "0" is wheelmount's own
    assert ("RUST_LIB_BACKTRACE" in child.run(["env"], timeout=60).stdout) == kept

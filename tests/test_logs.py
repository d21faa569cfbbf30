"""Nothing that is said over and over fills a disk."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from wheelmount import logs

FLOOD = "x" * 1023 + "\n"

WRITER = f"""
import os, sys
log = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
for _ in range({(logs.SIZE >> 10) + 1024}):
    os.write(log, {FLOOD.encode()!r})
print("written", flush=True)
sys.stdin.read()
os.write(log, b"the last\\n")
"""


def await_small(log: Path) -> None:
    """Wait until a log that was too large is so no more, and says so."""
    deadline = time.monotonic() + 60
    while b"left out" not in log.read_bytes()[:100] or log.stat().st_size > logs.SIZE:
        assert time.monotonic() < deadline, "it stays too large"
        time.sleep(0.05)


def test_a_log_does_not_fill_a_disk(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("ab", buffering=0) as output:
        output.write(bytes(1000))
        logs.cut(output.fileno(), 1000)
        assert log.stat().st_size == 1000
        output.write(b"x")
        logs.cut(output.fileno(), 1000)
        output.write(b"the last\n")
    assert log.read_text().splitlines()[-1] == "the last"
    assert log.stat().st_size < 100


def test_a_log_is_bounded_while_it_is_written() -> None:
    with tempfile.TemporaryFile() as file:
        ended = logs.bound(file.fileno())
        subprocess.run(
            ["sh", "-c", f"yes {'x' * 1000} | head -c {logs.SIZE + 1000} >&2"],
            stderr=file,
            check=True,
        )
        await_small(Path(f"/proc/self/fd/{file.fileno()}"))
        subprocess.run(["sh", "-c", "echo the last >&2"], stderr=file, check=True)
        ended.set()
        file.seek(0)
        assert file.read().endswith(b"the last\n")


def test_logs_of_a_directory_are_bounded_as_long_as_a_process_runs(tmp_path: Path) -> None:
    log = tmp_path / "deep" / "log"
    log.parent.mkdir()
    (tmp_path / "link").symlink_to(log)
    os.mkfifo(tmp_path / "pipe")
    lock = tmp_path / "lock"
    lock.touch()
    os.utime(lock, (1, 1))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", WRITER, log], **pipes) as writer:  # type: ignore[call-overload]
        program = [sys.executable, "-I", "-S", logs.__file__, str(writer.pid), str(tmp_path)]
        with (
            lock.open() as held,
            subprocess.Popen([*program, str(held.fileno())], pass_fds=[held.fileno()]) as bounding,
        ):
            assert writer.stdout.readline() == b"written\n"
            await_small(log)
            assert bounding.poll() is None
            writer.communicate(timeout=60)
            assert bounding.wait(60) == 0
    assert lock.stat().st_mtime > time.time() - 3600, "it was in use until then"
    assert log.read_text().splitlines()[-1] == "the last"


def test_a_lock_whose_file_system_fails_is_no_failure(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as process:
        logs.main(process.pid, str(tmp_path), 999)

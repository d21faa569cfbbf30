"""What a script says stays between the client and its hosts."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.containers.test_running import processes, wait_until

pytestmark = [
    pytest.mark.containers,
    pytest.mark.fuse,
    pytest.mark.hosts,
    pytest.mark.timeout(600),
]

COMMAND = [sys.executable, "-m", "wheelmount.cli.main"]


def _told(secret: bytes) -> list[str]:
    """Processes that tell others, or their own children, a secret."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "environ"):
            with contextlib.suppress(OSError):
                if secret in (process / name).read_bytes():
                    found.append((process / "cmdline").read_text(errors="replace"))
    return found


@pytest.mark.costly
@pytest.mark.parametrize("where", ["host", "container"])
@pytest.mark.parametrize("size", [140_000, 5 << 20])
def test_no_process_tells_what_a_script_says(
    where: str, size: int, sif: Path, source: Path, workplace: Path
) -> None:
    secret = "token-b2f7c0d5"  # noqa: S105 - of nothing
    mark = {"host": "40.0001", "container": "40.0002"}[where]
    padding = b"# \xff not text\n" + b"#" * 79 + b"\n"
    text = f": {secret}\nsleep {mark} &\nread -r _\nkill $!\necho $((6 * 7)) {secret}\n".encode()
    script = workplace / "work" / "script"
    script.write_bytes(text.replace(b"\n", b"\n" + padding * (size // len(padding)) + b"\n", 1))
    image = ["--image", str(sif)] if where == "container" else []
    command = [*COMMAND, "run", "-q", *image, "--hosts", "local:1", str(source), str(script)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
        wait_until(lambda: processes(mark), 40)
        assert _told(secret.encode()) == []
        said, _ = client.communicate(b"\n", timeout=40)
    assert said == f"42 {secret}\n".encode()
    assert client.returncode == 0

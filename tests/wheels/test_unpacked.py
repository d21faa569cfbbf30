from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from wheelmount.errors import WheelError
from wheelmount.wheels.archive import hash_file, opened
from wheelmount.wheels.unpacked import Unpacked

from .support import make_wheel, sha256, with_files


def test_what_is_unpacked_is_what_was_hashed(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "a")
    checked = hash_file(wheel)
    make_wheel(tmp_path / "evil", "a", module=b"EVIL = 1\n").replace(wheel)  # after the check
    unpacked = Unpacked(tmp_path / "unpacked")
    with pytest.raises(WheelError, match=f"a-1.0-py3-none-any.whl has the sha256 {sha256(wheel)}"):
        unpacked.add([(wheel, checked)])
    assert not list((tmp_path / "unpacked" / "wheels").iterdir())
    make_wheel(tmp_path, "a")
    (recipe,) = unpacked.add([(wheel, checked)])
    (content,) = (c for _, f in recipe.schemes() for p, c in f.items() if p == "a.py")
    assert Path(unpacked.object(content)).read_bytes() == b"VALUE = '1.0'\n"


def test_a_file_that_is_swapped_while_it_is_read_is_refused(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "a")
    before = wheel.read_bytes()
    with pytest.raises(WheelError, match="changed while it was read"):  # noqa: SIM117
        with opened(wheel) as (stream, _):
            time.sleep(0.02)  # a tick of the clock that changes are told by
            make_wheel(tmp_path / "evil", "a", padding=10).replace(wheel)
            assert stream.read() == before


def test_a_file_that_is_written_to_while_it_is_read_is_refused(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "a")
    before = wheel.stat()
    with pytest.raises(WheelError, match="changed while it was read"), opened(wheel):
        while wheel.stat().st_ctime_ns == before.st_ctime_ns:  # its clock ticks in milliseconds
            threading.Event().wait(0.001)
            wheel.write_bytes(wheel.read_bytes())
            os.utime(wheel, ns=(before.st_atime_ns, before.st_mtime_ns))


UNPACK = """
import os, sys
from pathlib import Path
from wheelmount.wheels.unpacked import Unpacked
if os.getuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
wheel, digest, place = sys.argv[1:]
(recipe,) = Unpacked(Path(place)).add([(Path(wheel), digest)])
for scheme, name in ("purelib", "twice.py"), ("scripts", "twice"):
    print(Path(Unpacked(Path(place)).object(recipe.files[scheme][name])).read_text())
"""


def test_two_files_for_one_place_are_no_matter_for_an_ordinary_user() -> None:
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        place.chmod(0o777)
        wheel = with_files(
            make_wheel(place, "twice"),
            {
                "twice-1.0.data/purelib/twice.py": b"LATER = 1",
                "twice-1.0.data/scripts/twice": b"#!python\nLATER = 2",
                "twice-1.0.dist-info/entry_points.txt": b"[console_scripts]\ntwice = twice:main\n",
            },
        )
        done = subprocess.run(
            [sys.executable, "-c", UNPACK, str(wheel), sha256(wheel), str(place / "unpacked")],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert "LATER = 1" in done.stdout
        assert "LATER = 2" in done.stdout


@pytest.mark.parametrize("spoil", [lambda file: file.unlink(), lambda file: file.write_bytes(b"")])
def test_a_file_that_was_lost_is_unpacked_again(
    tmp_path: Path, spoil: Callable[[Path], object]
) -> None:
    wheel, unpacked = make_wheel(tmp_path, "a"), Unpacked(tmp_path / "unpacked")
    (recipe,) = unpacked.add([(wheel, sha256(wheel))])
    file, link = Path(unpacked.object(recipe.files["purelib"]["a.py"])), tmp_path / "link"
    link.hardlink_to(file)
    before = file.stat()
    spoil(file)
    assert unpacked.add([(wheel, sha256(wheel))]) == [recipe]
    after = file.stat()
    assert (after.st_mtime_ns, after.st_mode) == (before.st_mtime_ns, before.st_mode)
    assert file.read_bytes() == link.read_bytes() == b"VALUE = '1.0'\n"

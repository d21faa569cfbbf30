from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from wheelmount import disk
from wheelmount.errors import (
    InputError,
    ResolveError,
    SourceError,
    StoreError,
    TransferError,
    UnavailableError,
    WaitError,
    WheelError,
)
from wheelmount.wheels import archive
from wheelmount.wheels import download as download_module
from wheelmount.wheels import fetch as fetch_module
from wheelmount.wheels.download import DownloadReport, download, locked, pending
from wheelmount.wheels.scratch import scratch

from .support import TARGET, Fault, Index, lock_of, make_wheel, package_of, sha256

SIZE = 50_000


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_module, "LONGEST_PAUSE", 0.01)


@pytest.fixture
def wheel(index: Index) -> Path:
    return make_wheel(index.directory, "big", padding=SIZE)


@pytest.fixture
def house(tmp_path: Path) -> Path:
    return tmp_path / "house"


def fetch(index: Index, house: Path, *wheels: Path, jobs: int = 8) -> DownloadReport:
    lock = lock_of(*(package_of(wheel, index.file_url(wheel)) for wheel in wheels))
    return download(lock, house, target=TARGET, jobs=jobs)


def left(house: Path) -> list[str]:
    """What is in the directory, without the files that are always there."""
    always = {".wheelmount.lock", "requests", "wheelmount.json"}
    return sorted(file.name for file in house.iterdir() if file.name not in always)


def test_all_wheels_arrive(index: Index, house: Path) -> None:
    wheels = [make_wheel(index.directory, f"a{i}", padding=1000 * i) for i in range(20)]
    report = fetch(index, house, *wheels, jobs=4)
    assert left(house) == sorted(wheel.name for wheel in wheels)
    for wheel in wheels:
        assert (house / wheel.name).read_bytes() == wheel.read_bytes()
    assert set(report.wheels) == set(report.fetched) == {wheel.name for wheel in wheels}
    assert report.size == report.fetched_size == sum(wheel.stat().st_size for wheel in wheels)


def test_fetched_at_the_same_time(index: Index, house: Path) -> None:
    wheels = [make_wheel(index.directory, f"a{i}", padding=9000) for i in range(8)]
    together = threading.Barrier(len(wheels))  # which fails where they do not come
    for wheel in wheels:
        index.faults[wheel.name] = [Fault(together=together)]
    assert len(fetch(index, house, *wheels).fetched) == len(wheels)
    assert not together.broken


def test_what_is_there_is_not_fetched_again(index: Index, house: Path, wheel: Path) -> None:
    fetch(index, house, wheel)
    other = make_wheel(index.directory, "other")
    report = fetch(index, house, wheel, other)
    assert report.fetched == (other.name,)
    assert report.fetched_size == other.stat().st_size < report.size
    assert len(index.asked(wheel)) == 1


def test_what_is_there_is_not_even_read(
    index: Index, house: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch(index, house, wheel)
    read: list[Path] = []
    hash_file = archive.hash_file
    monkeypatch.setattr(download_module, "hash_file", lambda f: read.append(f) or hash_file(f))  # type: ignore[func-returns-value]
    fetch(index, house, wheel)
    assert read == []
    os.utime(house / wheel.name)  # touched: it has to be looked at, and is still right
    assert fetch(index, house, wheel).fetched == ()
    assert read == [house / wheel.name]


def test_a_wheel_put_there_by_hand_counts(index: Index, house: Path, wheel: Path) -> None:
    house.mkdir()
    shutil.copy(wheel, house)
    assert fetch(index, house, wheel).fetched == ()
    assert index.requests == []


def test_a_damaged_wheel_is_replaced(index: Index, house: Path, wheel: Path) -> None:
    fetch(index, house, wheel)
    (house / wheel.name).write_bytes(b"damaged")
    assert fetch(index, house, wheel).fetched == (wheel.name,)
    assert sha256(house / wheel.name) == sha256(wheel)


def test_goes_on_within_one_run(index: Index, house: Path, wheel: Path) -> None:
    index.faults[wheel.name] = [Fault(cut=20_000), Fault(status=503), Fault(cut=10_000)]
    fetch(index, house, wheel)
    assert index.asked(wheel) == [None, "bytes=20000-", "bytes=20000-", "bytes=30000-"]
    assert left(house) == [wheel.name]
    assert sha256(house / wheel.name) == sha256(wheel)


def test_goes_on_in_the_next_run(index: Index, house: Path, wheel: Path) -> None:
    house.mkdir()
    (house / f"{wheel.name}.part").write_bytes(wheel.read_bytes()[:12_345])
    fetch(index, house, wheel)
    assert index.asked(wheel) == ["bytes=12345-"]
    assert left(house) == [wheel.name]
    assert sha256(house / wheel.name) == sha256(wheel)


def test_cut_off_just_before_its_name(index: Index, house: Path, wheel: Path) -> None:
    house.mkdir()
    shutil.copy(wheel, house / f"{wheel.name}.part")
    fetch(index, house, wheel)
    assert left(house) == [wheel.name]
    assert len(index.asked(wheel)) == 1  # answered with 416: nothing came again


@pytest.mark.parametrize("part", [b"other bytes" * 100, b"too long" * SIZE])
def test_a_part_of_something_else(index: Index, house: Path, wheel: Path, part: bytes) -> None:
    house.mkdir()
    (house / f"{wheel.name}.part").write_bytes(part)
    fetch(index, house, wheel)
    assert index.asked(wheel) == [f"bytes={len(part)}-", None]
    assert left(house) == [wheel.name]
    assert sha256(house / wheel.name) == sha256(wheel)


def test_a_server_without_ranges(index: Index, house: Path, wheel: Path) -> None:
    index.faults[wheel.name] = [Fault(cut=20_000), Fault(no_range=True)]
    fetch(index, house, wheel)
    assert len(index.asked(wheel)) == 2
    assert sha256(house / wheel.name) == sha256(wheel)


def test_wrong_hash(index: Index, house: Path, wheel: Path) -> None:
    index.faults[wheel.name] = [Fault(body=b"x" * SIZE)]
    with pytest.raises(WheelError, match=wheel.name) as caught:
        fetch(index, house, wheel)
    assert sha256(wheel) in caught.value.message
    assert caught.value.hint
    assert left(house) == []
    assert len(index.asked(wheel)) == 1  # the same bytes would come again


def test_wrong_hash_of_a_local_file(index: Index, house: Path, wheel: Path) -> None:
    lock = lock_of(package_of(wheel, digest="00" * 32))
    with pytest.raises(WheelError, match=wheel.name):
        download(lock, house, target=TARGET)
    assert left(house) == []


def test_gives_up(index: Index, house: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index.faults[wheel.name] = [Fault(cut=20_000), *[Fault(status=503)] * 50]
    with pytest.raises(TransferError, match="503") as caught:
        fetch(index, house, wheel)
    assert "127.0.0.1" in caught.value.message
    assert len(index.asked(wheel)) == fetch_module.ATTEMPTS
    assert left(house) == [f"{wheel.name}.part"]  # kept, for the next run to go on from
    index.faults.clear()
    assert fetch(index, house, wheel).fetched == (wheel.name,)


def test_does_not_insist(index: Index, house: Path, wheel: Path) -> None:
    index.faults[wheel.name] = [Fault(status=404)]
    with pytest.raises(TransferError, match="404"):
        fetch(index, house, wheel)
    assert len(index.asked(wheel)) == 1


def test_nobody_listens(index: Index, house: Path, wheel: Path) -> None:
    lock = lock_of(package_of(wheel, f"http://127.0.0.1:1/{wheel.name}"))
    with pytest.raises(TransferError, match=r"from 127\.0\.0\.1"):
        download(lock, house, target=TARGET)
    lock = lock_of(package_of(wheel, f"ftp://127.0.0.1/{wheel.name}"))
    with pytest.raises(TransferError, match="ftp"):
        download(lock, house, target=TARGET)


def test_a_server_that_goes_quiet(
    index: Index, house: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_module, "STALL", 1.0)
    index.faults[wheel.name] = [Fault(cut=1000, hang=True)]
    fetch(index, house, wheel)
    assert index.asked(wheel)[:2] == [None, "bytes=1000-"]


def test_one_failure_ends_all(
    index: Index, house: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_module, "STALL", 300.0)
    bad = make_wheel(index.directory, "bad")
    index.faults[bad.name] = [Fault(status=404)]
    index.faults[wheel.name] = [Fault(cut=1000, hang=True)]
    started = time.monotonic()
    with pytest.raises(TransferError, match="bad"):
        fetch(index, house, wheel, bad)
    assert time.monotonic() - started < 40  # and not the seconds of STALL
    assert left(house) in ([f"{wheel.name}.part"], [])


@pytest.mark.slow
def test_interrupted(index: Index, house: Path, wheel: Path) -> None:
    quick = make_wheel(index.directory, "quick")
    index.faults[wheel.name] = [Fault(cut=20_000, hang=True)]
    program = (
        "import sys; from pathlib import Path; from tests_support import *\n"
        "from wheelmount.wheels.download import download\n"
        "from wheelmount.wheels import fetch; fetch.STALL = 300\n"
        "wheels = [package_of(Path(w), u) for w, u in zip(sys.argv[2::2], sys.argv[3::2])]\n"
        "download(lock_of(*wheels), Path(sys.argv[1]), target=TARGET)\n"
    ).replace("tests_support", f"{__package__}.support")
    arguments = [word for w in (wheel, quick) for word in (str(w), index.file_url(w))]
    part = house / f"{wheel.name}.part"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(house), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            deadline = time.monotonic() + 60
            while not ((house / quick.name).exists() and part.exists() and part.stat().st_size):
                assert child.poll() is None, child.communicate()[1]
                assert time.monotonic() < deadline
                time.sleep(0.02)
            child.send_signal(signal.SIGINT)
            _, errors = child.communicate(timeout=60)  # soon, though the server says nothing
        finally:
            child.kill()
    assert "KeyboardInterrupt" in errors
    assert left(house) == sorted([part.name, quick.name])
    came = part.read_bytes()
    assert wheel.read_bytes()[:20_000].startswith(came)
    assert fetch(index, house, wheel, quick).fetched == (wheel.name,)
    assert index.asked(wheel)[-1] == f"bytes={len(came)}-"


def test_local_files(house: Path, tmp_path: Path) -> None:
    odd = make_wheel(tmp_path / "odd %41 name", "a", "1.0+cpu")
    near = make_wheel(house / "near", "b")
    by_path = package_of(near)
    by_path["wheels"][0] |= {"path": f"near/{near.name}"}
    del by_path["wheels"][0]["url"]
    download(lock_of(package_of(odd), by_path), house, target=TARGET)
    assert left(house) == [odd.name, near.name, "near"]


def test_a_local_file_that_is_gone(house: Path, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "gone", "a")
    lock = lock_of(package_of(wheel))
    wheel.unlink()
    with pytest.raises(SourceError, match=str(wheel)):
        download(lock, house, target=TARGET)


def test_two_at_once(index: Index, house: Path, wheel: Path) -> None:
    index.faults[wheel.name] = [Fault(pause=0.01)]
    reports: list[DownloadReport] = []
    threads = [
        threading.Thread(target=lambda: reports.append(fetch(index, house, wheel)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(len(report.fetched) for report in reports) == [0, 1]
    assert len(index.asked(wheel)) == 1


def test_the_wait_for_another_is_bounded(
    index: Index, house: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download_module, "LOCK_TIMEOUT", 0.1)
    with locked(house), pytest.raises(WaitError):
        fetch(index, house, wheel)
    assert fetch(index, house, wheel).fetched == (wheel.name,)


def test_a_full_disk(
    index: Index, house: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Links are not followed there.
    monkeypatch.setattr(fetch_module, "_open_no_link", lambda _, flags: os.open("/dev/full", flags))
    with pytest.raises(StoreError) as caught:
        fetch(index, house, wheel)
    assert str(house) in caught.value.message


def test_a_file_in_place_of_the_directory(index: Index, house: Path, wheel: Path) -> None:
    house.write_text("")
    with pytest.raises(SourceError, match=str(house)):
        fetch(index, house, wheel)


def test_no_wheel_for_the_target(index: Index, house: Path) -> None:
    wheel = make_wheel(index.directory, "a", tag="cp310-cp310-manylinux_2_17_aarch64")
    with pytest.raises(ResolveError):
        fetch(index, house, wheel)
    assert not house.exists()


def test_jobs(index: Index, house: Path, wheel: Path) -> None:
    with pytest.raises(InputError):
        fetch(index, house, wheel, jobs=0)


def test_an_environment_in_which_nothing_connects(
    index: Index, house: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (house.parent / "bad.pem").write_text("no certificate")
    monkeypatch.setenv("SSL_CERT_FILE", str(house.parent / "bad.pem"))
    with pytest.raises(UnavailableError) as caught:
        fetch(index, house, wheel)
    assert "SSL_CERT_FILE" in (caught.value.hint or "")


def test_a_proxy_is_honoured(
    index: Index, house: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "")
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("http_proxy", index.address)
    lock = lock_of(package_of(wheel, f"http://elsewhere.invalid/files/{wheel.name}"))
    with pytest.raises(TransferError, match="404"):  # this server does not know whole URLs
        download(lock, house, target=TARGET)
    assert index.requests[0][0] == f"http://elsewhere.invalid/files/{wheel.name}"


@pytest.mark.parametrize("how", ["url", "names", "uv.toml", "project", "netrc", "own url"])
def test_credentials(
    index: Index,
    house: Path,
    wheel: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    index.password = "p@ss"  # noqa: S105
    with pytest.raises(TransferError, match="401"):
        fetch(index, house, wheel)
    if how == "url":
        monkeypatch.setenv("UV_INDEX", index.url.replace("://", "://me:p%40ss@"))
    elif how == "names":
        monkeypatch.setenv("UV_INDEX", f"https://other.invalid/simple my-own={index.url}")
        monkeypatch.setenv("UV_INDEX_MY_OWN_USERNAME", "me")
        monkeypatch.setenv("UV_INDEX_MY_OWN_PASSWORD", "p@ss")
    elif how == "uv.toml":
        monkeypatch.setenv("UV_CONFIG_FILE", str(tmp_path / "my-uv.toml"))
        url = index.url.replace("://", "://me:p%40ss@")
        (tmp_path / "my-uv.toml").write_text(f'[pip]\nextra-index-url = ["{url}"]\n')
    elif how == "project":
        monkeypatch.delenv("UV_NO_CONFIG")
        monkeypatch.setenv("UV_INDEX_MINE_USERNAME", "me")
        monkeypatch.setenv("UV_INDEX_MINE_PASSWORD", "p@ss")
        (tmp_path / "uv.toml").write_text("[broken")
        (tmp_path / "pyproject.toml").write_text(
            f'[[tool.uv.index]]\nname = "mine"\nurl = "{index.url}"\n'
        )
    elif how == "netrc":
        (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password p@ss\n")
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    if how == "own url":
        url = index.file_url(wheel).replace("://", "://me:p%40ss@")
        download(lock_of(package_of(wheel, url)), house, target=TARGET)
    else:
        fetch(index, house, wheel)


def test_credentials_stay_with_their_origin(
    index: Index, house: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.password = "p@ss"  # noqa: S105
    port = httpx.URL(index.url).port or 0
    other = index.url.replace("://", "://me:p%40ss@").replace(f":{port}", f":{port + 1}")
    monkeypatch.setenv("UV_INDEX", other)
    with pytest.raises(TransferError, match="401"):
        fetch(index, house, wheel)


def test_nothing_is_written_where_links_lead(index: Index, house: Path, wheel: Path) -> None:
    """Others may put links into a directory of wheels that they may write to."""
    precious = house.with_name("precious")
    precious.write_text("precious")
    house.mkdir()
    (house / f"{wheel.name}.part").symlink_to(precious)
    (house / f".note.{os.getpid()}").symlink_to(precious)
    fetch(index, house, wheel)
    disk.write(house / "note", b"x")
    assert (house / wheel.name).read_bytes() == wheel.read_bytes()
    assert not (house / wheel.name).is_symlink()
    assert precious.read_text() == "precious"


def test_locks_that_another_process_is_writing_stay(tmp_path: Path) -> None:
    with scratch(tmp_path) as place:
        lock = pending(place)
        files = [lock, lock.with_name(f".{lock.name}.1"), lock.with_name(f".{lock.stem}-1.toml.2")]
        for file in files:
            file.touch()
        with locked(tmp_path):
            assert all(file.exists() for file in files)
        shutil.copytree(place, tmp_path / "kept")
    (tmp_path / "kept").rename(place)  # as if its maker was killed
    with locked(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [".wheelmount.lock"]

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from wheelmount.errors import ResolveError, WheelError
from wheelmount.wheels.lockfile import chosen_wheels, parse_lock

from .support import ARM, TARGET, lock_of

HASHES = {"sha256": "ab" * 32}


def package(*names: str, **more: Any) -> dict[str, Any]:
    wheels = [{"name": name, "url": f"https://x/{name}", "hashes": HASHES} for name in names]
    return {"name": "a", "version": "1.0", "wheels": wheels, **more}


def test_the_wheel_of_the_target() -> None:
    lock = lock_of(
        package(
            "a-1.0-py3-none-any.whl",
            "a-1.0-cp312-cp312-manylinux_2_28_aarch64.whl",
            "a-1.0-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
            "a-1.0-cp311-cp311-manylinux_2_39_x86_64.whl",
        )
    )
    (wheel,) = chosen_wheels(lock, TARGET)
    assert wheel.filename == "a-1.0-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl"
    assert wheel.pin == "a==1.0"
    (wheel,) = chosen_wheels(lock, ARM)
    assert wheel.filename.endswith("aarch64.whl")


def test_markers_are_the_targets() -> None:
    lock = lock_of(package("a-1.0-py3-none-any.whl", marker="platform_machine == 'aarch64'"))
    assert chosen_wheels(lock, TARGET) == []
    assert len(chosen_wheels(lock, ARM)) == 1


def test_a_marker_without_a_meaning() -> None:
    lock = lock_of(package("a-1.0-py3-none-any.whl", marker="os_name ~= 'posix'"))
    with pytest.raises(ResolveError, match="does not fit"):
        chosen_wheels(lock, TARGET)


def test_no_fitting_wheel() -> None:
    lock = lock_of(package("a-1.0-cp312-cp312-win_amd64.whl"))
    with pytest.raises(ResolveError, match="'a'") as caught:
        chosen_wheels(lock, ARM)
    assert str(ARM) in caught.value.message


@pytest.mark.parametrize(
    "sources",
    [
        {"sdist": {"name": "a-1.0.tar.gz", "url": "https://x/a-1.0.tar.gz", "hashes": HASHES}},
        {"archive": {"url": "https://x/a-1.0.tar.gz", "hashes": HASHES}},
        {"vcs": {"type": "git", "url": "https://x/a", "commit-id": "00"}},
        {"directory": {"path": "a"}},
    ],
)
def test_only_a_source_distribution(sources: dict[str, Any]) -> None:
    table = {"name": "a", "version": "1.0", **sources}
    with pytest.raises(ResolveError, match="only a source distribution exists") as caught:
        chosen_wheels(lock_of(table), ARM)
    assert "--build a" in (caught.value.hint or "")


def test_a_wheel_by_url_or_path() -> None:
    name = "a-1.0%2Bcpu-py3-none-any.whl"
    table = {
        "name": "a",
        "version": "1.0+cpu",
        "archive": {"url": f"https://x/{name}", "hashes": HASHES},
    }
    (wheel,) = chosen_wheels(lock_of(table), ARM)
    assert (wheel.filename, wheel.version) == ("a-1.0+cpu-py3-none-any.whl", "1.0+cpu")
    table["archive"] = {"path": "near/a-1.0+cpu-py3-none-any.whl", "hashes": HASHES}
    (wheel,) = chosen_wheels(lock_of(table), ARM)
    assert wheel.source == "near/a-1.0+cpu-py3-none-any.whl"


@pytest.mark.parametrize(
    ("filename", "reason"),
    [
        ("../a-1.0-py3-none-any.whl", "not a file name"),
        ("/etc/a-1.0-py3-none-any.whl", "not a file name"),
        ("b-1.0-py3-none-any.whl", "not a wheel of a"),
        ("a-2.0-py3-none-any.whl", "not a wheel of a"),
        ("a-1.0.whl", "bad wheel"),
    ],
)
def test_names_that_are_not_trusted(filename: str, reason: str) -> None:
    url = "https://x/" + filename.replace("/", "%2F")
    table = {"name": "a", "version": "1.0", "archive": {"url": url, "hashes": HASHES}}
    with pytest.raises(WheelError, match=reason):
        chosen_wheels(lock_of(table), ARM)
    with pytest.raises(WheelError, match="not a lock file"):
        parse_lock(
            'lock-version = "1.0"\ncreated-by = "test"\n[[packages]]\nname = "a"\nversion = "1.0"\n'
            f'wheels = [{{ url = "{url}", hashes = {{ sha256 = "00" }} }}]\n'
        )


def test_no_sha256() -> None:
    wheel = {"url": "https://x/a-1.0-py3-none-any.whl", "hashes": {"md5": "00"}}
    with pytest.raises(WheelError, match="no sha256"):
        chosen_wheels(lock_of({"name": "a", "version": "1.0", "wheels": [wheel]}), ARM)


@pytest.mark.parametrize("text", ["[", "", 'lock-version = "9.0"', "packages = 1"])
def test_no_lock_file(text: str, tmp_path: Path) -> None:
    with pytest.raises(WheelError, match="here is not a lock file"):
        parse_lock(text, "here")

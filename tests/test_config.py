"""Settings and errors."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import NOBODY
from wheelmount import config, errors
from wheelmount.config import Settings, private_directory
from wheelmount.containers.overlay import Overlay
from wheelmount.errors import ConfigError, SourceError, WheelmountError


def _classes(kind: type[WheelmountError]) -> list[type[WheelmountError]]:
    return [kind, *(c for sub in kind.__subclasses__() for c in _classes(sub))]


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own file of settings, which is not there yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "own"))
    monkeypatch.setenv("WHEELMOUNT_STATE_DIR", str(tmp_path / "state"))
    config.own_file().parent.mkdir(parents=True)
    return config.own_file()


def test_environment_beats_the_project_beats_the_user_beats_the_default(
    tmp_path: Path, own: Path
) -> None:
    own.write_text('hosts = "local:3"\nfanout = 7\nring = 40\nin_flight = 8\n')
    (tmp_path / "pyproject.toml").write_text(
        "[tool.wheelmount]\nin_flight = 9\nread_timeout = 5\nring = 41\n"
    )
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    settings, origins = config.load_with_origins({"WHEELMOUNT_IN_FLIGHT": "2"}, below)
    assert (settings.hosts, settings.in_flight, settings.read_timeout) == ("local:3", 2, 5.0)
    assert (settings.ring, settings.fanout) == (41, 7)
    assert settings.fetch_timeout == Settings().fetch_timeout
    assert origins["hosts"] == origins["fanout"] == str(own)
    assert origins["ring"] == str(tmp_path / "pyproject.toml")
    assert (origins["in_flight"], origins["store"]) == ("WHEELMOUNT_IN_FLIGHT", config.DEFAULT)


@pytest.mark.parametrize("root", ["pyproject.toml", ".git"])
def test_the_search_ends_at_the_root_of_a_project(tmp_path: Path, root: str) -> None:
    (tmp_path / "wheelmount.toml").write_text("ring = 3\n")
    below = tmp_path / "project" / "deep"
    below.mkdir(parents=True)
    assert config.load({}, below).ring == 3
    (below.parent / root).touch()
    assert config.load({}, below).ring == Settings().ring


def test_the_search_ends_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, below = tmp_path / "home", tmp_path / "home" / "a"
    below.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    (tmp_path / "wheelmount.toml").write_text("ring = 3\n")
    assert config.load({}, below).ring == Settings().ring
    (home / "wheelmount.toml").write_text("ring = 4\n")
    assert config.load({}, below).ring == 4


def test_a_file_of_its_own_beats_the_project_beside_it(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.wheelmount]\nin_flight = 4\nring = 3\n")
    (tmp_path / "wheelmount.toml").write_text("in_flight = 5\n")
    settings = config.load({}, tmp_path)
    assert (settings.in_flight, settings.ring) == (5, Settings().ring)


def _said(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records)


def test_a_project_does_not_say_where_code_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "project"
    place.mkdir()
    file = place / "wheelmount.toml"
    kept = [name for name in Settings.__dataclass_fields__ if name not in config.OF_PROJECTS]
    assert {"hosts", "python", "runtime_dir", "store", "cache_dir", "state_dir"} <= set(kept)
    file.write_text("".join(f'{name} = "/evil"\n' for name in kept) + "ring = 5\n")
    environ = {"WHEELMOUNT_STATE_DIR": str(tmp_path / "state")}
    settings, origins = config.load_with_origins(environ, place)
    assert (settings.ring, settings.hosts, settings.python) == (5, "", "")
    assert settings.store == Settings().store
    assert set(origins.values()) == {config.DEFAULT, str(file), "WHEELMOUNT_STATE_DIR"}
    (line,) = _said(caplog).splitlines()
    assert "hosts, python" in line
    assert f"wheelmount config trust {place}" in line


def test_a_trusted_file_counts_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "wheelmount.toml"
    file.write_text('hosts = "local:5"\n')
    tmp_path.chmod(0o777)  # others may write here: what was trusted is what counts
    assert config.load(directory=tmp_path).hosts == ""
    assert config.trust(tmp_path) == (file, {"hosts": "local:5"})
    assert config.load(directory=tmp_path).hosts == "local:5"
    (mark,) = (tmp_path / "state" / "trusted").iterdir()
    assert (mark.stat().st_mode & 0o777, mark.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    mark.parent.chmod(0o755)  # it may not have been this user who made the mark
    assert config.load(directory=tmp_path).hosts == ""
    mark.parent.chmod(0o700)
    file.write_text('hosts = "local:6"\n')
    assert config.load(directory=tmp_path).hosts == ""
    config.trust(tmp_path)
    assert len(list(mark.parent.iterdir())) == 1
    assert config.load(directory=tmp_path).hosts == "local:6"
    config.trust(tmp_path, trusted=False)
    assert config.load(directory=tmp_path).hosts == ""
    file.unlink()
    with pytest.raises(SourceError, match="no settings"):
        config.trust(tmp_path)


def _belongs_to_another(file: Path) -> None:
    os.chown(file, NOBODY, NOBODY)


def _others_may_write(file: Path) -> None:
    file.chmod(0o646)


def _a_group_may_write(file: Path) -> None:
    os.chown(file, 0, NOBODY)
    file.chmod(0o664)


def _others_may_replace_it(file: Path) -> None:
    file.parent.chmod(0o1777)


def _others_may_replace_its_directory(file: Path) -> None:
    file.parent.parent.chmod(0o777)


def _another_owns_the_directory(file: Path) -> None:
    os.chown(file.parent, NOBODY, NOBODY)


def _a_link_to_another_s_file(file: Path) -> None:
    elsewhere = file.parent / "elsewhere"
    file.rename(elsewhere)
    os.chown(elsewhere, NOBODY, NOBODY)
    file.symlink_to(elsewhere)


@pytest.mark.skipif(os.getuid() != 0, reason="gives files to another user")
@pytest.mark.parametrize(
    "spoil",
    [
        _belongs_to_another,
        _others_may_write,
        _a_group_may_write,
        _others_may_replace_it,
        _others_may_replace_its_directory,
        _another_owns_the_directory,
        _a_link_to_another_s_file,
    ],
)
@pytest.mark.parametrize("whose", ["project", "user"])
def test_a_file_that_others_can_have_written_is_passed_over(
    tmp_path: Path,
    own: Path,
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[Path], None],
    whose: str,
) -> None:
    place = tmp_path / "above" / "project"
    place.mkdir(parents=True)
    file = own if whose == "user" else place / "wheelmount.toml"
    file.write_text("ring = 3\n")
    assert config.load({}, place).ring == 3
    assert not caplog.records
    spoil(file)
    assert config.load({}, place).ring == Settings().ring
    (line,) = _said(caplog).splitlines()
    assert f"{file.resolve()} is passed over: " in line


def test_what_is_passed_over_does_not_hide_what_counts(tmp_path: Path) -> None:
    (tmp_path / "wheelmount.toml").write_text("ring = 3\n")
    place = tmp_path / "sticky"
    place.mkdir()
    place.chmod(0o1777)
    for name, text in (("wheelmount.toml", "not TOML"), ("pyproject.toml", "tool = 3")):
        (place / name).write_text(text)
    (place / "pyproject.toml").unlink()
    assert config.load({}, place).ring == 3


@pytest.mark.parametrize("kind", ["pipe", "device", "directory", "loop"])
def test_what_is_no_file_is_not_opened(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "wheelmount.toml"
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "directory":
        file.mkdir()
    else:
        file.symlink_to("/dev/zero" if kind == "device" else file)
    assert config.load({}, tmp_path) == config.load({}, Path("/"))


@pytest.mark.skipif(os.getuid() != 0, reason="becomes other users")
def test_a_stranger_s_settings_in_a_directory_above_do_not_count() -> None:
    with tempfile.TemporaryDirectory(prefix="wm-", dir="/tmp") as name:
        shared = Path(name)
        shared.chmod(0o1777)
        subprocess.run(
            ["sh", "-c", 'echo \'hosts = "tcp://127.0.0.1:9"\' >"$0/wheelmount.toml"', name],
            check=True,
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
        )
        for user in (0, NOBODY - 1):
            mine = shared / f"user{user}"
            mine.mkdir()
            os.chown(mine, user, user)
            shown = subprocess.run(
                [sys.executable, "-c", SHOW, str(user), str(mine)],
                env={"HOME": str(mine / "home"), "WHEELMOUNT_STATE_DIR": str(mine)},
                capture_output=True,
                text=True,
                check=True,
                timeout=60,
            )
            assert "tcp" not in shown.stdout
            assert json.loads(shown.stdout)["hosts"] == ""
            # As another user they are below where the search ends.
            assert ("belongs to" in shown.stderr) == (user == 0)


SHOW = """
import dataclasses, encodings.idna, json, os, sys
from wheelmount import config
os.setgroups([]), os.setgid(int(sys.argv[1])), os.setuid(int(sys.argv[1]))
os.chdir(sys.argv[2])
print(json.dumps(dataclasses.asdict(config.load())))
"""


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"WHEELMOUNT_RING": "many"}, "WHEELMOUNT_RING"),
        ({"WHEELMOUNT_RING": "0"}, "ring"),
        ({"WHEELMOUNT_BLOCK_SIZE": "1000"}, "block_size"),
        ({"WHEELMOUNT_READ_TIMEOUT": "-1"}, "read_timeout"),
        ({"WHEELMOUNT_COMPRESS": "zstd"}, "compress"),
        ({"WHEELMOUNT_TRANSPORT": "tls"}, "transport"),
        ({"WHEELMOUNT_ADAPTER": "foo"}, "adapter"),
        ({"WHEELMOUNT_CACHE_SIZE": "-1"}, "cache_size"),
        ({"WHEELMOUNT_IN_FLIGHT": "1.9"}, "IN_FLIGHT"),
        ({"WHEELMOUNT_READ_TIMEOUT": "nan"}, "READ_TIMEOUT"),
        ({"WHEELMOUNT_READ_TIMEOUT": "inf"}, "READ_TIMEOUT"),
    ],
)
def test_values_without_meaning_are_named(
    tmp_path: Path, environ: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        config.load(environ, tmp_path)
    assert error.value.hint


@pytest.mark.parametrize(
    "text",
    [
        *("ring = inf", "ring = nan", "ring = true", "in_flight = 1.9", "fanout = []", "ring = {}"),
        *("read_timeout = nan", "read_timeout = false", f"read_timeout = 1{'0' * 400}"),
        *("racks = ['a']", "racks = true", "racks = 2020-01-01", f"ring = '{'1' * 5000}'"),
    ],
    ids=lambda text: text[:20],
)
def test_values_of_another_kind_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "wheelmount.toml").write_text(f"{text}\n")
    with pytest.raises(ConfigError, match=text.partition(" ")[0]) as error:
        config.load({}, tmp_path)
    assert str(error.value.hint).startswith("give ")


def test_numbers_may_be_written_as_text_and_with_a_point(tmp_path: Path) -> None:
    (tmp_path / "wheelmount.toml").write_text("ring = '7'\nin_flight = 8.0\nread_timeout = 9\n")
    found = config.load({}, tmp_path)
    assert (found.ring, found.in_flight, found.read_timeout) == (7, 8, 9.0)


@pytest.mark.parametrize("text", ["[tool.wheelmount]\nunknown = 1\n", "[tool.wheel", "a = \n"])
def test_a_bad_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"pyproject\.toml"):
        config.load({}, tmp_path)


def test_private_directories_are_private(tmp_path: Path) -> None:
    path = private_directory(tmp_path / "mine")
    assert path.stat().st_mode & 0o777 == 0o700
    assert private_directory(path) == path
    path.chmod(0o755)
    with pytest.raises(ConfigError, match="not a private directory"):
        private_directory(path)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="not a private directory"):
        private_directory(tmp_path / "link")


@pytest.mark.skipif(os.getuid() != 0, reason="gives directories to another user")
@pytest.mark.parametrize("what", ["directory", "link", "file"])
def test_a_name_that_another_user_has_taken_is_done_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    tmp_path.chmod(0o1777)
    name = tmp_path / f"wheelmount-{os.getuid()}"
    if what == "directory":
        name.mkdir(mode=0o700)
    elif what == "link":
        name.symlink_to(tmp_path)
    else:
        name.touch()
    os.chown(name, NOBODY, NOBODY, follow_symlinks=False)
    decoy = tmp_path / f"{name.name}-0-decoy"
    decoy.mkdir(mode=0o700)
    os.chown(decoy, NOBODY, NOBODY)
    settings = Settings(runtime_dir=str(tmp_path), store=str(tmp_path))
    place = settings.private_runtime()
    assert place not in (name, decoy)
    assert (place.stat().st_uid, place.stat().st_mode & 0o777) == (0, 0o700)
    assert "made by another user" in _said(caplog)
    assert settings.private_runtime() == settings.private_store(mounted=False) == place
    name.rmdir() if what == "directory" else name.unlink()
    assert settings.private_runtime() == place, "what lies there is still found"


def overlays(settings: Settings) -> Path:
    """Make the directory of overlays."""
    with Overlay(Path(settings.state_dir), "some", "host0").lock("test"):
        return Path(settings.state_dir) / "overlays"


@pytest.mark.parametrize(
    ("setting", "make"),
    [
        ("runtime_dir", Settings.private_runtime),
        ("store", partial(Settings.private_store, mounted=False)),
        ("store_keep", Settings.private_kept),
        ("cache_dir", Settings.own_cache),
        ("state_dir", overlays),
    ],
)
def test_places_where_others_may_replace_what_is_private_are_refused(
    tmp_path: Path, setting: str, make: Callable[[Settings], Path]
) -> None:
    shared = tmp_path / "shared"
    (shared / "below").mkdir(parents=True)
    own = setting == "cache_dir"  # which is the setting's directory itself
    for place in [shared, shared / "below", shared / "missing"][own:]:
        changed: dict[str, Any] = {setting: str(place)}
        settings = replace(Settings(), **changed)
        shared.chmod(0o777)
        with pytest.raises(ConfigError, match=f"replace what is in {shared}, where {setting} is"):
            make(settings)
        shared.chmod(0o1777)
        assert make(settings).stat().st_mode & 0o777 == (0o755 if own else 0o700)


def test_a_link_that_others_may_replace_is_refused(tmp_path: Path) -> None:
    shared, own = tmp_path / "shared", tmp_path / "target"
    shared.mkdir()
    own.mkdir()
    (shared / "link").symlink_to("../target")
    shared.chmod(0o777)
    for place in shared / "link", shared / "link" / "below":
        settings = replace(Settings(), runtime_dir=str(place))
        with pytest.raises(ConfigError, match=f"replace what is in {shared}, where runtime_dir is"):
            settings.private_runtime()
    shared.chmod(0o755)
    own.chmod(0o777)
    settings = replace(Settings(), runtime_dir=str(shared / "link"))
    with pytest.raises(ConfigError, match=f"replace what is in {own}, where runtime_dir is"):
        settings.private_runtime()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a directory to a group")
def test_places_that_a_group_may_replace_are_used_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As directories of projects on clusters are."""
    shared = tmp_path / "project"
    shared.mkdir()
    os.chown(shared, -1, 12345)
    shared.chmod(0o2770)
    settings = replace(Settings(), runtime_dir=str(shared), cache_dir=str(shared / "cache"))
    for _ in range(2):
        assert settings.private_runtime().stat().st_mode & 0o777 == 0o700
    warned = f"users of its group may rename and replace what is in {shared}"
    assert caplog.text.count(warned) == 1
    for _ in range(2):
        assert settings.own_cache().stat().st_mode & 0o777 == 0o755
    assert caplog.text.count(f"{warned}, where cache_dir is") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a directory away")
@pytest.mark.parametrize("mode", [0o755, 0o1777])
def test_places_that_another_user_has_made_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    """The owner may rename what is in them, also if they are sticky."""
    shared = tmp_path / "made"
    shared.mkdir()
    shared.chmod(mode)
    os.chown(shared, NOBODY, NOBODY)
    settings = replace(Settings(), runtime_dir=str(shared), state_dir=str(shared / "state"))
    said = f"nobody may rename and replace what is in {shared}"
    tmp_path.chmod(0o1777)
    for setting, make in (("runtime_dir", Settings.private_runtime), ("state_dir", overlays)):
        with pytest.raises(ConfigError, match=f"{said}, where {setting} is") as error:
            make(settings)
        assert error.value.hint == f"set WHEELMOUNT_{setting.upper()} elsewhere"
    tmp_path.chmod(0o755)  # root has given it to its owner, as where it is of a project
    assert settings.private_runtime().stat().st_mode & 0o777 == 0o700
    assert f"{said}, where runtime_dir is" in caplog.text


def test_volumes_of_a_pod_may_be_writable_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o777)  # as an emptyDir is
    settings = replace(Settings(), runtime_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="other users may rename"):
        settings.private_runtime()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert settings.private_runtime().stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("kind", _classes(WheelmountError))
def test_errors_survive_the_way_between_processes(kind: type[WheelmountError]) -> None:
    error = pickle.loads(pickle.dumps(kind("what", hint="do")))  # noqa: S301
    assert (type(error), error.message, error.hint, str(error)) == (kind, "what", "do", "what")


def test_exit_codes_stay_clear_of_shells() -> None:
    codes = {kind.exit_code for kind in _classes(errors.WheelmountError)}
    others = {1, 124}  # of a command that failed, and of timeout(1)
    assert all(64 <= code <= 78 for code in codes - others)


@pytest.mark.parametrize("name", ["store", "runtime_dir", "cache_dir", "state_dir"])
@pytest.mark.parametrize("value", ["below", "~/below", ""])
def test_directories_are_absolute_paths(name: str, value: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value!r}, no absolute path"):
        config.load({f"WHEELMOUNT_{name.upper()}": value}, tmp_path)

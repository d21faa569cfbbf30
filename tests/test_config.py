"""Settings and errors."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from wheelmount import config, errors
from wheelmount.config import Settings, private_directory
from wheelmount.errors import ConfigError, WheelmountError


def _classes(kind: type[WheelmountError]) -> list[type[WheelmountError]]:
    return [kind, *(c for sub in kind.__subclasses__() for c in _classes(sub))]


def test_environment_beats_the_file_beats_the_default(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[tool.wheelmount]\nhosts = "local:3"\nin_flight = 9\nread_timeout = 5\n'
    )
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    settings = config.load({"WHEELMOUNT_IN_FLIGHT": "2"}, below)
    assert (settings.hosts, settings.in_flight, settings.read_timeout) == ("local:3", 2, 5.0)
    assert settings.ring == Settings().ring


def test_a_file_without_our_table_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.wheelmount]\nhosts = "local:4"\n')
    below = tmp_path / "project"
    below.mkdir()
    (below / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert config.load({}, below).hosts == "local:4"


def test_a_file_of_its_own_beats_the_project_beside_it(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.wheelmount]\nhosts = "local:4"\nring = 3\n')
    (tmp_path / "wheelmount.toml").write_text('hosts = "local:5"\n')
    settings, origins = config.load_with_origins({"WHEELMOUNT_FANOUT": "2"}, tmp_path)
    assert (settings.hosts, settings.ring, settings.fanout) == ("local:5", Settings().ring, 2)
    assert origins["hosts"] == str(tmp_path / "wheelmount.toml")
    assert (origins["fanout"], origins["ring"]) == ("WHEELMOUNT_FANOUT", config.DEFAULT)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"WHEELMOUNT_RING": "many"}, "WHEELMOUNT_RING"),
        ({"WHEELMOUNT_RING": "0"}, "ring"),
        ({"WHEELMOUNT_BLOCK_SIZE": "1000"}, "block_size"),
        ({"WHEELMOUNT_READ_TIMEOUT": "-1"}, "read_timeout"),
        ({"WHEELMOUNT_COMPRESS": "zstd"}, "compress"),
    ],
)
def test_values_without_meaning_are_named(
    tmp_path: Path, environ: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        config.load(environ, tmp_path)
    assert error.value.hint


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


@pytest.mark.parametrize("kind", _classes(WheelmountError))
def test_errors_survive_the_way_between_processes(kind: type[WheelmountError]) -> None:
    error = pickle.loads(pickle.dumps(kind("what", hint="do")))  # noqa: S301
    assert (type(error), error.message, error.hint, str(error)) == (kind, "what", "do", "what")


def test_exit_codes_stay_clear_of_shells() -> None:
    codes = {kind.exit_code for kind in _classes(errors.WheelmountError)}
    assert all(64 <= code <= 78 for code in codes)

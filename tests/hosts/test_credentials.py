"""Certificates of a user's own processes."""

from __future__ import annotations

import contextlib
import os
import ssl
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import Cli
from wheelmount.config import Settings
from wheelmount.errors import ConfigError, InputError
from wheelmount.hosts.credentials import Authority, decode
from wheelmount.variables import TLS


def _file(settings: Settings) -> Path:
    return Path(settings.state_dir) / "credentials" / "authority.pem"


def test_a_user_has_one_authority_that_nobody_else_may_read(settings: Settings) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: Authority.of_user(settings).encode(), range(4)))
    assert len(set(found)) == 1
    assert _file(settings).stat().st_mode & 0o777 == 0o600
    assert _file(settings).parent.stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in _file(settings).parent.iterdir()) == [
        "authority.pem",
        "lock",
    ]
    assert Authority.decode(found[0]).encode() == found[0]


def test_one_that_others_may_read_is_not_used(settings: Settings) -> None:
    Authority.of_user(settings)
    _file(settings).chmod(0o640)
    with pytest.raises(ConfigError, match="others may read") as error:
        Authority.of_user(settings)
    assert str(_file(settings)) in str(error.value.hint)


def test_those_of_a_worker_are_a_file_that_nobody_else_may_read(cli: Cli, workplace: Path) -> None:
    file = workplace / "work" / "own.pem"
    file.write_text("old")
    words = "worker", "tls://localhost:1"
    assert cli(*words, "--issue", "--output", "own.pem", umask=0).returncode == 0
    assert file.stat().st_mode & 0o777 == 0o600
    assert set(decode(file.read_bytes(), [])) == set(TLS)
    file.chmod(0o640)
    done = cli(*words, "--credentials", "own.pem")
    assert (done.returncode, "error: others may read own.pem" in done.stderr) == (78, True)
    assert "hint: run: chmod 600 own.pem; " in done.stderr
    file.chmod(0o600)
    os.chown(file, 65534, 65534)
    done = cli(*words, "--credentials", "own.pem")
    assert (done.returncode, "own.pem belongs to another user" in done.stderr) == (78, True)
    assert cli(*words, "--output", "own.pem").returncode == 64


def test_a_damaged_one_is_named(settings: Settings) -> None:
    Authority.of_user(settings)
    _file(settings).write_text("nonsense")
    with pytest.raises(ConfigError, match=str(_file(settings))):
        Authority.of_user(settings)
    with pytest.raises(InputError):
        Authority.decode(b"")


@pytest.mark.parametrize("reached_as", ["127.0.0.1", "node1"])
def test_processes_of_one_authority_know_each_other(workplace: Path, reached_as: str) -> None:
    ours, theirs = Authority.make(), Authority.make()
    assert _shake_hands(workplace, ours, ours, ["127.0.0.1", "node1"], reached_as) is None
    for server, client, names in (
        (ours, theirs, [reached_as]),
        (theirs, ours, [reached_as]),
        (ours, ours, ["node2"]),
    ):
        assert _shake_hands(workplace, server, client, names, reached_as) is not None


def _shake_hands(
    place: Path, server: Authority, client: Authority, names: list[str], reached_as: str
) -> ssl.SSLError | None:
    """What goes wrong when one connects to the other, as ``reached_as``."""
    sides = []
    for authority, mine in ((server, names), (client, ["client"])):
        issued = authority.issue(mine)
        file = place / "identity.pem"
        file.write_text(issued["HYPERACTOR_TLS_CERT"] + issued["HYPERACTOR_TLS_KEY"])
        is_server = authority is server and mine is names
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(file)
        context.load_verify_locations(cadata=issued["HYPERACTOR_TLS_CA"])
        sides.append(context)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        sides[0].wrap_bio(there, back, server_side=True),
        sides[1].wrap_bio(back, there, server_hostname=reached_as),
    ]
    try:
        for _ in range(3):
            for end in reversed(ends):
                with contextlib.suppress(ssl.SSLWantReadError):
                    end.do_handshake()
    except ssl.SSLError as error:
        return error
    return None


def test_settings_say_where_it_lies(settings: Settings, workplace: Path) -> None:
    other = replace(settings, state_dir=str(workplace / "work" / "deep" / "state"))
    assert Authority.of_user(other).encode() != Authority.of_user(settings).encode()

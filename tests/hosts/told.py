"""What processes of a host find in their environment, and so tell all that its user runs there."""

from __future__ import annotations

import json
import sys

from tests.testbed import Lab
from wheelmount.variables import CREDENTIALS, TLS

_LOOK = """
import json, pathlib
found = []
for process in pathlib.Path("/proc").glob("[0-9]*"):
    try:
        words, said = (process / "cmdline").read_text(), (process / "environ").read_text()
    except OSError:
        continue
    pairs = [one.partition("=") for one in said.split(chr(0))]
    found.append((words.replace(chr(0), " "), {name: value for name, _, value in pairs}))
print(json.dumps(found))
"""

OF_MONARCH = "wheelmount.hosts.process", "/process "
"""In the command line of a process that Monarch starts, and of the script by which it does."""


def environments(lab: Lab, host: str) -> list[tuple[str, dict[str, str]]]:
    """Command line and environment of each process of a host."""
    look = [sys.executable, "-I", "-S", "-c", _LOOK]
    return [(words, told) for words, told in json.loads(lab.run(host, look, check=True).stdout)]


def assert_only_monarch_is_told(processes: list[tuple[str, dict[str, str]]]) -> None:
    """No process but Monarch's has a key, or what Monarch tells processes; a mount is served."""
    assert [words for words, _ in processes if "wheelmount.mount.serve.server" in words]
    secrets = {CREDENTIALS, *TLS, "HYPERACTOR_MESH_BOOTSTRAP_MODE"}
    told = {words for words, variables in processes if secrets.intersection(variables)}
    assert told
    assert {words for words in told if not any(own in words for own in OF_MONARCH)} == set()

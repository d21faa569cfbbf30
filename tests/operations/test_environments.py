"""Which Python an environment is for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from wheelmount.config import Settings
from wheelmount.errors import InputError
from wheelmount.hosts import spec
from wheelmount.operations import environments, targets
from wheelmount.operations.environments import Needed
from wheelmount.operations.site import Site
from wheelmount.progress import SILENT
from wheelmount.wheels import carried
from wheelmount.wheels.carried import Carried
from wheelmount.wheels.target import Target


def plan(settings: Settings, requires: str, interpreter: str = "") -> None:
    """Plan an environment without packages for a script."""
    needed = Needed(python=requires, interpreter=interpreter)
    site = Site(spec.parse("local:1"), settings, SILENT)
    with environments._planned(site, needed, None, None):
        pass


@pytest.mark.parametrize("brought", [False, True])
@pytest.mark.parametrize("full", ["3.12.9", "3.12.9rc1", "3.12.9+"])
def test_a_script_may_ask_for_a_patch_level(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, full: str, brought: bool
) -> None:
    monkeypatch.setattr(environments, "full_version", lambda: "3.12.1" if brought else full)
    python = Carried("3.12", full, Path("/nowhere"))
    monkeypatch.setattr(carried, "find", lambda _: python)
    for requires in ">=3.12.2", ">=3.12", "==3.12.*", ">3.12.8,<3.13":
        plan(settings, requires, "3.12" if brought else "")
    for requires in ">=3.12.10", "<3.12.9":
        with pytest.raises(InputError, match=f"requires Python {requires}, and this is") as caught:
            plan(settings, requires, "3.12" if brought else "")
        assert str(caught.value).endswith(full)
        assert f"--python '{requires}'" in str(caught.value.hint)


def test_each_host_s_patch_level_counts(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [(Target.here(), "/usr/bin/python3", full) for full in ("3.12.9", "3.12.3")]
    monkeypatch.setattr(targets, "ask_bases", lambda _: answers)
    pool: Any = object()
    site = Site(spec.parse("local:2"), settings, SILENT)
    with environments._planned(site, Needed(python=">=3.12.2"), None, pool):
        pass
    needed = Needed(python=">=3.12.4")
    with (
        pytest.raises(InputError, match=r"and this is 3\.12\.3"),
        environments._planned(site, needed, None, pool),
    ):
        pass

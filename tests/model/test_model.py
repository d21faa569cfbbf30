"""A source that is edited at random shows, after each refresh, as a plain copy of it says.

Examples are few and the same each time; more, and others each time, for as long as they take:
``WHEELMOUNT_MODEL=200 pytest --hypothesis-profile=random tests/model``, with the number of examples
for each way to show a tree.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.model.source import EDITS, Snapshot, Source, pick, snapshot
from tests.model.worlds import (
    Alone,
    Bound,
    Contained,
    ContainedFuse,
    Libfuse,
    List,
    Mount,
    Read,
    World,
)
from tests.mount.conformance import Shown

EXAMPLES = int(os.environ.get("WHEELMOUNT_MODEL", "0"))
"""Examples for each world; 0: a few."""


class Model(RuleBasedStateMachine):
    """Edits of a source, and what its clients and users do."""

    world_of: Callable[[Path, Path], World]
    counts_names = True
    """Whether the numbers of names that files have are to be right at once."""

    def __init__(self) -> None:
        super().__init__()
        self._place = Path(tempfile.mkdtemp(prefix="wm-", dir="/tmp"))  # short: sockets lie in it
        self._place.chmod(0o755)  # a closed one would close root's mounts as well
        self._source = Source(self._place / "source")
        self._world: World | None = None
        self._expected: Snapshot = {}
        self._held: list[tuple[bytes, bytes, Read]] = []
        self._listed: list[tuple[list[set[bytes]], List]] = []
        self._views: list[Shown] = []

    @property
    def world(self) -> World:
        assert self._world is not None
        return self._world

    def _begin(self) -> None:
        place = self._place / "world"
        place.mkdir()
        self._world = type(self).world_of(self._source.path, place)
        self._expected = self._source.snapshot()

    @initialize(edits=st.lists(EDITS, max_size=3))
    def mount(self, edits: list[list[Any]]) -> None:
        for some in edits:
            self.edit(some)
        self._begin()

    @rule(edits=EDITS)
    def edit(self, edits: list[Any]) -> None:
        for edit in edits:
            self._source.edit(*edit)

    @rule(edits=EDITS)
    def refresh(self, edits: list[Any]) -> None:
        self.edit(edits)
        self.world.refresh()
        self._expected = self._source.snapshot()

    @rule(edits=EDITS)
    def give_up_a_refresh(self, edits: list[Any]) -> None:
        self.edit(edits)
        self.world.abandon()

    @rule()
    def another_client(self) -> None:
        self.world.another_client()

    @rule()
    def kill(self) -> None:
        self.world.kill()

    @rule(which=pick, mapped=st.booleans())
    def open(self, which: int, mapped: bool) -> None:
        files = [path for path, its in self._expected.items() if stat.S_ISREG(its.mode)]
        if files:
            path = files[which % len(files)]
            data = self._expected[path].data
            read = self.world.map(path) if mapped and data else self.world.open(path)
            self._held.append((path, data, read))

    @rule(which=pick)
    def open_directory(self, which: int) -> None:
        entries = self._expected.items()
        directories = [path for path, its in entries if stat.S_ISDIR(its.mode)]
        path = directories[which % len(directories)]
        self._listed.append(([self._names(path)], self.world.open_directory(path)))

    def _names(self, path: bytes) -> set[bytes]:
        """Names in a directory of the source as it is shown."""
        return {
            each.rpartition(b"/")[2]
            for each in self._expected
            if each and each.rpartition(b"/")[0] == path
        }

    @precondition(lambda self: len(self._views) < 2)
    @rule()
    def view(self) -> None:
        view = self.world.view()
        if view is not None:
            self._views.append(view)

    @precondition(lambda self: self._held)
    @rule()
    def mount_again(self) -> None:
        self._end()
        self._begin()

    @invariant()
    def is_shown(self) -> None:
        if self._world is not None:
            for shown in (self._world.shown(), *self._views):
                self._compare(snapshot(shown))

    def _compare(self, shown: Snapshot) -> None:
        assert shown.keys() == self._expected.keys()
        for path, expected in self._expected.items():
            found = shown[path]
            if not self.counts_names and not stat.S_ISDIR(expected.mode):
                found.nlink = expected.nlink
            assert found == expected, path

    @invariant()
    def stays_open(self) -> None:
        for path, data, read in self._held:
            assert read() == data, path

    @invariant()
    def lists_a_whole_directory(self) -> None:
        if self._listed:
            all_of = [self._names(p) for p, i in self._expected.items() if stat.S_ISDIR(i.mode)]
            for seen, listing in self._listed:
                # It may have been moved meanwhile; what was listed once, may be again.
                names = listing()
                assert names in seen or names in all_of
                seen.append(names)

    def _end(self) -> None:
        self._held.clear()
        self._listed.clear()
        self._views.clear()
        if self._world is not None:
            self._world.end()
            self._world = None
        shutil.rmtree(self._place / "world", ignore_errors=True)

    def teardown(self) -> None:
        self._end()
        shutil.rmtree(self._place)


class AloneModel(Model):
    world_of = Alone


class DevfuseModel(Model):
    world_of = Mount


class Pyfuse3Model(Model):
    world_of = Libfuse


class BindModel(Model):
    world_of = Bound
    counts_names = False  # a file that two generations share shows the names of both


class ContainedFuseModel(Model):
    world_of = ContainedFuse


class ContainedModel(Model):
    world_of = Contained
    counts_names = False  # see BindModel


def _run(model: type[Model], examples: int) -> None:
    phases = set(hypothesis.Phase) if EXAMPLES else {hypothesis.Phase.generate}
    settings = hypothesis.settings(
        max_examples=EXAMPLES or examples,
        stateful_step_count=40 if EXAMPLES else 15,
        report_multiple_bugs=False,
        verbosity=hypothesis.Verbosity.debug if EXAMPLES else hypothesis.Verbosity.normal,
        phases=phases - {hypothesis.Phase.explain},
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    run_state_machine_as_test(model, settings=settings)


@pytest.mark.slow
@pytest.mark.timeout(0 if EXAMPLES else 300)
def test_the_tree_and_its_store() -> None:
    _run(AloneModel, 30)


@pytest.mark.fuse
@pytest.mark.timeout(0 if EXAMPLES else 300)
@pytest.mark.parametrize("model", [DevfuseModel, Pyfuse3Model, BindModel])
def test_mounts(model: type[Model]) -> None:
    _run(model, 2)


@pytest.mark.fuse
@pytest.mark.containers
@pytest.mark.timeout(0 if EXAMPLES else 600)
@pytest.mark.parametrize("model", [ContainedFuseModel, ContainedModel])
def test_running_containers(model: type[Model], sif: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.world_of, "sif", sif, raising=False)
    _run(model, 1)

"""What the model found, in few steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.model.test_model import (
    BindModel,
    ContainedFuseModel,
    ContainedModel,
    DevfuseModel,
    Model,
    Pyfuse3Model,
)

pytestmark = pytest.mark.fuse


@pytest.fixture(params=[DevfuseModel, Pyfuse3Model, BindModel])
def model(request: pytest.FixtureRequest) -> Model:
    made: Model = request.param()
    request.addfinalizer(made.teardown)
    return made


def _holds(model: Model) -> None:
    model.is_shown()
    model.lists_a_whole_directory()
    model.stays_open()


def test_who_lists_an_open_directory_again_hides_no_new_file(model: Model) -> None:
    model.mount([[("write", 0, b"a", 0, 0), ("write", 0, b"b", 1, 0)]])
    model.open_directory(0)
    _holds(model)
    model.refresh([("overwrite", 0, 0, 0, False), ("delete", 1), ("write", 0, b"c", 1, 0)])
    for _ in range(2):
        _holds(model)
        model.open(0, False)


def test_other_places_of_a_mount_follow_it(model: Model) -> None:
    _follow(model)


@pytest.mark.containers
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", [ContainedFuseModel, ContainedModel])
def test_running_containers_follow_a_mount(
    kind: type[Model], sif: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(kind.world_of, "sif", sif, raising=False)
    model = kind()
    request.addfinalizer(model.teardown)
    _follow(model)


def _follow(model: Model) -> None:
    model.mount([[("write", 0, b"a", 0, 0), ("write", 0, b"b", 4096, 0)]])
    model.view()
    model.open(1, True)
    for number in range(3):
        model.refresh([("overwrite", 0, 0, number, False), ("write", 0, b"c", 1, number)])
        _holds(model)
    model.kill()
    _holds(model)

"""Images of registries, pulled by this machine alone and shown to hosts by mounts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from wheelmount.config import Settings
from wheelmount.containers import registry
from wheelmount.errors import InputError
from wheelmount.hosts.spec import HostSpec
from wheelmount.operations import cache
from wheelmount.operations.image import Image, point_of
from wheelmount.operations.pools import HostPool
from wheelmount.operations.site import Site
from wheelmount.progress import Progress


def place(settings: Settings) -> Path:
    """Where images of registries are kept."""
    return Path(settings.cache_dir) / "images"


def pull(reference: str, settings: Settings, progress: Progress) -> Path:
    """Bring what a reference means now into the cache; gives the file.

    Raises:
        InputError: it is no reference to a registry.
        ContainerError: it cannot be pulled.
        UnavailableError: apptainer is missing.
    """
    if not reference.startswith(registry.SCHEMES):
        raise InputError(
            f"{reference} is no image of a registry",
            hint=f"they begin with {', '.join(registry.SCHEMES)}",
        )
    with cache.used(settings):
        return registry.pull(reference, place(settings), progress, anew=True)


@contextlib.contextmanager
def here(image: Image, site: Site) -> Iterator[Image]:
    """Have the images of registries on this machine, and kept from being removed meanwhile.

    Yields:
        The same container, of files of this machine.

    Raises:
        ContainerError: one cannot be pulled.
        UnavailableError: apptainer is missing.
    """
    paths = dict(image.paths)
    with contextlib.ExitStack() as stack:
        for name, reference in image.references.items():
            with cache.used(site.settings):
                paths[name] = registry.pull(reference, place(site.settings), site.progress)
                folder = paths[name].parent
                stack.enter_context(cache.hold(folder))
            os.utime(folder)  # used now
        yield replace(image, paths=paths)


@contextlib.contextmanager
def shown(image: Image, pool: HostPool, spec: HostSpec) -> Iterator[Image]:
    """Show hosts the images of registries that are here: by mounts where they are elsewhere.

    Args:
        image: as of ``here``.
        pool: the hosts.
        spec: what they are.

    Yields:
        The same container, of files of each host.

    Raises:
        InputError: it is an instance, and would lose its image when this command ends.
    """
    if not image.references or spec.kind == "local":
        yield image
        return
    if image.instance is not None and spec.session is None:
        raise InputError(
            "an instance outlives this command, and the image that is shown to it does not",
            hint="have hosts that stay first: wheelmount up",
        )
    paths = dict(image.paths)
    with contextlib.ExitStack() as stack:
        folders = dict.fromkeys(image.paths[name].parent for name in image.references)
        mounts = {
            folder: stack.enter_context(pool.mount(folder, point_of(spec, folder, "image")))
            for folder in folders
        }
        for host in pool.chosen:
            name = host.name if host.name in image.paths else ""
            if name in image.references:
                path = image.paths[name]
                paths[host.name] = Path(mounts[path.parent].mntpoints[host.name], path.name)
        yield replace(image, paths=paths)

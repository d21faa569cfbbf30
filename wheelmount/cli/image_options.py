"""Options of the commands that work in containers."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from wheelmount.cli import completion
from wheelmount.containers.overlay import KINDS
from wheelmount.errors import InputError


class _Size(click.ParamType[int]):
    name = "size"

    def convert(
        self, value: Any, _param: click.Parameter | None, _ctx: click.Context | None
    ) -> int:
        from wheelmount.operations.image import parse_size

        return value if isinstance(value, int) else parse_size(value)


def container(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options for a container, given on as ``image``: None without --image and --instance."""

    @click.option(
        "--image",
        "images",
        metavar="SIF",
        shell_complete=completion.images,
        help="In an offline container of this image, a file or docker://, oras://, library://… of "
        "a registry. HOST=SIF,HOST=SIF,… for different ones; one inside the directory that is "
        "mounted is taken from the mount.",
    )
    @click.option(
        "--overlay",
        shell_complete=completion.overlays,
        help="Name of the overlay that keeps what containers install, one a host; default one for "
        "each image.",
    )
    @click.option(
        "--overlay-kind",
        type=click.Choice(KINDS),
        help="What a new overlay is; default the fastest that stays: a directory, or where "
        "there can be none an image (one file). Memory is gone with the machine's next start.",
    )
    @click.option(
        "--overlay-size", type=_Size(), help="Make a new overlay in one file, of at most this size."
    )
    @click.option(
        "--instance",
        shell_complete=completion.instances,
        help="Keep the container running under this name.",
    )
    @click.option(
        "--bind",
        "binds",
        multiple=True,
        metavar="PATH[:TARGET[:rw]]",
        help="Show this of the host, read-only without :rw; may be repeated.",
    )
    @click.option(
        "--memory",
        type=_Size(),
        help="End what takes more memory than this, such as 8G, where cgroups allow to say so.",
    )
    @click.option(
        "--cpus",
        type=click.FloatRange(min=0, min_open=True),
        help="Let it keep no more processors busy than this, such as 1.5, likewise.",
    )
    @click.option("--nv", is_flag=True, help="Let it use the host's NVIDIA devices.")
    @click.option(
        "--privileged",
        is_flag=True,
        help="Leave root in it all that root may do on the host; only root's containers differ.",
    )
    @wraps(command)
    def wrapped(
        *arguments: Any,
        images: str | None,
        overlay: str | None,
        overlay_kind: Any,
        overlay_size: int | None,
        instance: str | None,
        binds: tuple[str, ...],
        nv: bool,
        privileged: bool,
        memory: int | None,
        cpus: float | None,
        **values: Any,
    ) -> Any:
        values["image"] = None
        if instance is not None and (memory is not None or cpus is not None):
            raise InputError(
                "an instance that may run already gets no bounds",
                hint="leave --instance, or --memory and --cpus, out",
            )
        if images is not None or instance is not None or values.get("packages") is not None:
            # Here, as commands without a container need none of it.
            from wheelmount.operations.image import Image, parse_bind, parse_images

            paths, references = parse_images(images) if images is not None else ({}, {})
            values["image"] = Image(
                paths,
                overlay,
                overlay_kind,
                overlay_size,
                instance,
                [parse_bind(bind) for bind in binds],
                nv,
                privileged,
                references=references,
                memory=memory,
                cpus=cpus,
            )
        return command(*arguments, **values)

    return wrapped

"""Options of the commands that work in containers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    """Add the options for a container; passes ``image``: None without --image and --instance."""

    @click.option(
        "--image",
        "images",
        metavar="SIF",
        shell_complete=completion.images,
        help="Run in an offline container of this image: a SIF file, or docker://, oras://, "
        "library://… of a registry. HOST=SIF,HOST=SIF,… gives hosts different images. An image "
        "inside the mounted directory is read from the mount.",
    )
    @click.option(
        "--overlay",
        shell_complete=completion.overlays,
        help="Name of the overlay, one for each host, that keeps the files that containers write. "
        "Default: one overlay for each image.",
    )
    @click.option(
        "--overlay-kind",
        type=click.Choice(KINDS),
        help="Kind of a new overlay. Default: a directory, or an image (one file) where a "
        "directory is not supported. An overlay in memory is lost when the machine restarts.",
    )
    @click.option(
        "--overlay-size", type=_Size(), help="Make a new overlay as one file of at most this size."
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
        help="Bind this path of the host into the container, read-only unless :rw; repeatable.",
    )
    @click.option(
        "--memory",
        type=_Size(),
        help="Limit the container's memory, such as 8G, by a control group where one can be made.",
    )
    @click.option(
        "--cpus",
        type=click.FloatRange(min=0, min_open=True),
        help="Limit the container's processors, such as 1.5, by a control group likewise.",
    )
    @click.option("--nv", is_flag=True, help="Give the container the host's NVIDIA devices.")
    @click.option(
        "--privileged",
        is_flag=True,
        help="Keep all capabilities of the host's root in the container. For root only.",
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
        else:
            _refuse(
                {
                    "--overlay": overlay,
                    "--overlay-kind": overlay_kind,
                    "--overlay-size": overlay_size,
                    "--bind": binds,
                    "--memory": memory,
                    "--cpus": cpus,
                    "--nv": nv,
                    "--privileged": privileged,
                }
            )
        return command(*arguments, **values)

    return wrapped


def _refuse(values: Mapping[str, object]) -> None:
    """Refuse options of a container that are given where there is none.

    Raises:
        InputError: one of them has a value.
    """
    for option, value in values.items():
        if value:
            raise InputError(
                f"{option} is for a container, and nothing runs in one",
                hint=f"name its image by --image, or omit {option}",
            )

"""The serving process of a mount: its own process, so that it outlives the command that made it.

Run as ``python -m wheelmount.mount.server DIRECTORY READY_FD``. It serves the store through
pyfuse3 until it is told to stop or somebody unmounts it, and then removes store and directory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import psutil
import pyfuse3
import trio

from wheelmount.errors import MountError
from wheelmount.mount import control, point
from wheelmount.mount import store as stores
from wheelmount.mount.adapter import Adapter
from wheelmount.mount.fuse import FuseOperations
from wheelmount.mount.generations import Generations
from wheelmount.mount.store import Store
from wheelmount.mount.task import Task

log = logging.getLogger("wheelmount")

GRACE = 2.0
"""Seconds that users of a detached mount have before the process ends."""


class Server:
    """Serves one mount, and waits for bytes on behalf of its readers.

    Args:
        directory: of the mount.
        task: what to do.
        store: the generation to show.
    """

    def __init__(self, directory: Path, task: Task, store: Store) -> None:
        self.directory = directory
        self.task = task
        self.generations = Generations(task, store)
        self.vfs = self.generations.vfs
        self.started = time.time()
        self._waiting: dict[int, trio.Event] = {}
        self._failed: dict[int, str] = {}
        self._feeder: trio.SocketStream | None = None
        self._sending = trio.Lock()
        self._unmounted = trio.Event()

    async def read(self, number: int, offset: int, size: int) -> bytes:
        """Bytes of a file, once they are there.

        Raises:
            OSError: EIO, with the reason in the log.
        """
        with trio.move_on_after(self.task.read_timeout):
            while (data := self.vfs.read(number, offset, size)) is None:
                block = self.vfs.absent(number, offset, size)
                if block is not None:
                    await self._arrival(block, number)
            return data
        reason = f"its bytes did not come within {self.task.read_timeout:g} s"
        raise self.vfs.failure(number, reason)

    async def _arrival(self, block: int, number: int) -> None:
        if block in self._failed:
            raise self.vfs.failure(number, self._failed[block])
        if self._feeder is None:
            raise self.vfs.failure(number, "its bytes had not come when the client went away")
        event = self._waiting.get(block)
        if event is None:
            event = self._waiting[block] = trio.Event()
            await self._send(self._feeder, {"want": block})
        await event.wait()

    def _wake(self, block: int) -> None:
        event = self._waiting.pop(block, None)
        if event is not None:
            event.set()

    async def _send(self, stream: trio.SocketStream, message: control.Message) -> None:
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async with self._sending:
                await stream.send_all(control.encode(message))

    async def serve(self, adapter: Adapter, ready: int) -> None:
        """Serve until unmounted; say on the pipe ``ready`` when the control socket listens."""
        listener = trio.socket.socket(trio.socket.AF_UNIX)
        await listener.bind(str(self.directory / control.SOCKET))
        listener.listen()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                trio.serve_listeners, self._connection, [trio.SocketListener(listener)]
            )
            os.write(ready, b"ok")
            os.close(ready)
            nursery.start_soon(self._signals)
            await self.generations.serve(adapter, nursery)
            if self.generations.bound is not None:
                await self._bound()
            nursery.cancel_scope.cancel()

    async def _bound(self) -> None:
        """Wait for the end of a mount that the kernel shows alone."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch)
            await self._unmounted.wait()
            nursery.cancel_scope.cancel()

    async def _watch(self) -> None:
        """Notice that somebody else took the mount down."""
        while point.shows(self.task.mntpoint, Path(self.task.store)):
            await trio.to_thread.run_sync(point.await_change, abandon_on_cancel=True)
        self._unmounted.set()

    async def _signals(self) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as received:
            async for number in received:
                log.info("unmounting on signal %d", number)
                await self._unmount(force=True)

    async def _connection(self, stream: trio.SocketStream) -> None:
        try:
            async with contextlib.aclosing(_lines(stream)) as lines:
                await self._answer(stream, lines)
        except (ValueError, LookupError, TypeError) as error:
            log.warning("not understood on the control socket: %s", error)

    async def _answer(
        self, stream: trio.SocketStream, lines: AsyncGenerator[control.Message, None]
    ) -> None:
        request: control.Message = await anext(lines, {"op": "nothing"})
        match request["op"]:
            case "feed":
                await self._feed(stream, lines, keep=request["keep"])
            case "stop":
                await self._stop(stream, force=request["force"])
            case "show":
                await self._show(stream, request["generation"])
            case "status":
                await self._send(stream, self.status())

    def status(self) -> control.Message:
        """Where this mount stands; sizes in bytes, ``started`` in seconds since the epoch."""
        store = self.generations.shown
        return {
            "host": self.task.host,
            "source": self.task.source,
            "mntpoint": self.task.mntpoint,
            "adapter": "bind" if self.generations.bound else FuseOperations.name,
            "generation": store.generation,
            "namespace": point.View.here().namespace,
            "pid": os.getpid(),
            "started": self.started,
            "files": store.layout.tree.files,
            "size": store.layout.tree.size,
            "held": store.held(),
            "memory": psutil.Process().memory_info().rss,
            "waiting": len(self._waiting),
            "fed": self._feeder is not None,
            "changed": [os.fsdecode(path) for path in store.changed()],
        }

    async def _feed(
        self,
        stream: trio.SocketStream,
        lines: AsyncGenerator[control.Message, None],
        *,
        keep: bool,
    ) -> None:
        self._feeder = stream
        self._failed.clear()
        async for message in lines:
            if "have" in message:
                self._wake(message["have"])
            elif "failed" in message:
                self._failed[message["failed"]] = message["reason"]
                self._wake(message["failed"])
            elif "keep" in message:
                keep = message["keep"]
        self._feeder = None
        for block in list(self._waiting):
            self._wake(block)
        if not keep:
            log.info("who made this mount is gone: unmounting")
            await self._unmount(force=True)

    async def _show(self, stream: trio.SocketStream, generation: int) -> None:
        try:
            await self.generations.show(generation)
            answer: control.Message = {"ok": True}
        except OSError as error:
            log.exception("generation %d cannot be shown", generation)
            answer = {"ok": False, "message": f"generation {generation} cannot be shown: {error}"}
        await self._send(stream, answer)

    async def _stop(self, stream: trio.SocketStream, *, force: bool) -> None:
        try:
            await self._unmount(force=force)
        except MountError as error:
            answer = {"ok": False, "message": error.message}
        else:
            answer = {"ok": True}
        await self._send(stream, answer)

    async def _unmount(self, *, force: bool) -> None:
        bound, mntpoint = self.generations.bound, self.task.mntpoint
        if bound and self.generations.served and not force:
            raise MountError(
                f"{mntpoint} is busy: files that were opened before all bytes were there are in use"
            )
        # On a thread: the kernel may ask us something while it unmounts.
        await trio.to_thread.run_sync(lambda: point.unmount(mntpoint, force=force))
        self._unmounted.set()
        if force and self.generations.served:
            await trio.sleep(GRACE)
            pyfuse3.terminate()


async def _lines(stream: trio.SocketStream) -> AsyncGenerator[control.Message, None]:
    pending = b""
    while True:
        try:
            chunk = await stream.receive_some(1 << 16)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return
        if not chunk:
            return
        *whole, pending = (pending + chunk).split(b"\n")
        for line in whole:
            yield control.decode(line)


def main() -> None:
    """Mount, serve, clean up."""
    directory, ready = Path(sys.argv[1]), int(sys.argv[2])
    logging.basicConfig(
        filename=directory / "log",
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(message)s",
    )
    task = Task.read(directory)
    server = Server(directory, task, Store.open(Path(task.store)))
    adapter = FuseOperations(
        server.vfs, server.read, (os.getuid(), os.getgid()), server.generations.forgotten
    )
    options = {"ro", "default_permissions", "fsname=wheelmount", "subtype=wheelmount"}
    if os.getuid() == 0:
        options.add("allow_other")
    try:
        pyfuse3.init(adapter, task.mntpoint, options)
    except RuntimeError as error:
        os.write(ready, str(error).encode())
        sys.exit(1)
    log.info("serving %s at %s", task.source, task.mntpoint)
    try:
        trio.run(server.serve, adapter, ready)
    except BaseException:
        log.exception("the serving process fails")
        shutil.copy(directory / "log", f"{directory}.log")  # the rest goes, the reason stays
        with contextlib.suppress(MountError):
            point.unmount(task.mntpoint, force=True)
        raise
    finally:
        if task.made:
            with contextlib.suppress(OSError):
                Path(task.mntpoint).rmdir()
        stores.remove(Path(task.store))
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()

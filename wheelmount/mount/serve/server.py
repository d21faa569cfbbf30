"""The serving process of a mount: a process of its own that outlives the command that made it.

Run as ``python -m wheelmount.mount.serve.server DIRECTORY READY_FD``. The process serves the store
until it is told to stop or is unmounted, and then deletes store and directory.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sys
from collections.abc import AsyncGenerator
from dataclasses import asdict
from pathlib import Path

import trio

from wheelmount import disk, errors, logs
from wheelmount.errors import MountError, StoreError, UnavailableError
from wheelmount.mount.kernel import points, syscalls, users, views
from wheelmount.mount.serve import control, traffic
from wheelmount.mount.serve.adapters import Adapter
from wheelmount.mount.serve.control import PROCESS, TASK, Task
from wheelmount.mount.serve.fuse.attach import attach, set_read_ahead
from wheelmount.mount.serve.fuse.devfuse import DirectFuse
from wheelmount.mount.serve.fuse.wire import Session
from wheelmount.mount.serve.generations import Generations
from wheelmount.mount.serve.supervisor import ENDS, hold_back, let_through, supervise
from wheelmount.mount.store import store as stores
from wheelmount.mount.store import verify

log = logging.getLogger("wheelmount")

GRACE = 2.0
"""Seconds between detaching a mount that the kernel keeps and the end of its server."""

FEED_TIMEOUT = 10.0
"""Seconds in which an agent must connect to a server that took over, and that a read waits for an
agent."""

ANSWER_TIMEOUT = 10.0
"""Seconds in which a process must read the answer to its request."""

BEGIN_TIMEOUT = 20.0
"""Seconds in which the agent that made a mount must connect for the first time."""

VERIFY_PAUSE = 60.0
"""Seconds between verifications in the background."""

READ_AHEAD = 1024
"""KiB that the kernel reads ahead, where this user may set it; its default, 128, halves the speed
of reads."""

KEPT_LOGS = 16
"""Number of logs that are kept, for each user, of mounts that ended with an error."""

BOUND_FILE = "bound"
"""Name of a file in the mount's directory as long as the mount is to end with its agent.

It is made with the mount: to keep one then takes no room on a disk that has become full.
"""


class _Feeder:
    """The connection of an agent that delivers."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._sending = trio.Lock()

    async def send(self, message: control.Message) -> None:
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async with self._sending:
                await self._stream.send_all(control.encode(message))


class Server:
    """Serves one mount, and waits for missing bytes on behalf of its readers.

    Args:
        directory: the mount's private directory.
        task: what to serve, and where.
        resumed: whether it takes over from a server that died.
    """

    def __init__(self, directory: Path, task: Task, *, resumed: bool = False) -> None:
        self.directory = directory
        self.task = task
        self.generations = Generations(directory, task)
        self.vfs = self.generations.vfs
        self.started = (directory / TASK).stat().st_mtime
        self._resumed = resumed
        self._fed = trio.Event()
        self._waiting: dict[int, trio.Event] = {}
        self._failed: dict[int, str] = {}
        self._feeders: list[_Feeder] = []
        self._unmounted = trio.Event()

    async def read(self, number: int, offset: int, size: int) -> bytes:
        """Return bytes of a file; wait until they have arrived.

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
        with trio.move_on_after(FEED_TIMEOUT):  # the agent may be about to connect
            await self._fed.wait()
        if not self._feeders:
            raise self.vfs.failure(number, "its bytes had not arrived when the client ended")
        event = self._waiting.get(block)
        if event is None:
            event = self._waiting[block] = trio.Event()
            self._failed.pop(block, None)  # request the block again
            try:
                await self._feeders[-1].send({"want": block})
            except trio.Cancelled:
                self._wake(block)  # other readers of the block request it
                raise
        await event.wait()
        if block in self._failed:
            raise self.vfs.failure(number, self._failed[block])

    def _wake(self, block: int) -> None:
        event = self._waiting.pop(block, None)
        if event is not None:
            event.set()

    async def _send(self, stream: trio.SocketStream, message: control.Message) -> None:
        """Answer a request; its process is not waited for if it reads nothing for a while."""
        with (
            contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError),
            trio.move_on_after(ANSWER_TIMEOUT),
        ):
            await stream.send_all(control.encode(message))

    async def serve(self, adapter: Adapter, ready: int | None) -> None:
        """Serve until unmounted.

        Args:
            adapter: the FUSE server.
            ready: descriptor of a pipe to write to once the control socket listens, if any.
        """
        _bound_log(self.directory)
        (self.directory / control.SOCKET).unlink(missing_ok=True)
        listener = trio.socket.socket(trio.socket.AF_UNIX)
        await listener.bind(str(self.directory / control.SOCKET))
        listener.listen()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                trio.serve_listeners, self._connection, [trio.SocketListener(listener)]
            )
            patience = FEED_TIMEOUT if self._resumed else BEGIN_TIMEOUT
            if ready is not None:
                try:
                    os.write(ready, b"ok")
                except BrokenPipeError:  # the agent that made this mount was killed meanwhile
                    patience = 0.0
                os.close(ready)
            nursery.start_soon(self._signals)
            if self.task.verify_rate and not syscalls.in_memory(Path(self.task.store)):
                nursery.start_soon(self._verify)
            if (self.directory / BOUND_FILE).exists():
                nursery.start_soon(self._miss, patience)
            await self.generations.serve(adapter, nursery)
            if self.generations.bound is not None:
                await self._bound()
            nursery.cancel_scope.cancel()

    async def _verify(self) -> None:
        """Verify a store on a disk repeatedly."""
        store, rate = Path(self.task.store), self.task.verify_rate
        while True:
            await trio.sleep(VERIFY_PAUSE)
            if self.generations.shown.missing():
                continue
            try:
                found = await trio.to_thread.run_sync(
                    lambda: verify.verify(store, rate=rate), abandon_on_cancel=True
                )
            except (StoreError, OSError) as error:  # the store changed meanwhile
                log.info("not verified: %s", error)
                continue
            verify.note(self.directory, found)
            if found.wrong:
                log.error("damaged: %s", ", ".join(found.wrong))

    async def _miss(self, timeout: float) -> None:
        """Unmount if no agent connects in time: it ended before that, or while no server ran."""
        with trio.move_on_after(timeout):
            await self._fed.wait()
        if not self._fed.is_set():
            await self._end("the command that made this mount has ended")

    async def _bound(self) -> None:
        """Wait for the end of a bind mount."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch)
            await self._unmounted.wait()
            nursery.cancel_scope.cancel()

    async def _watch(self) -> None:
        """Wait until another program unmounts the mount, then end."""
        while _stands(self.directory):
            await trio.to_thread.run_sync(points.await_change, abandon_on_cancel=True)
        self._unmounted.set()

    async def _signals(self) -> None:
        with trio.open_signal_receiver(*ENDS) as received:
            let_through()
            async for number in received:
                await self._end(f"signal {number}")

    async def _connection(self, stream: trio.SocketStream) -> None:
        try:
            async with contextlib.aclosing(_lines(stream)) as lines:
                await self._answer(stream, lines)
        except (ValueError, LookupError, TypeError) as error:
            log.warning("malformed message on the control socket: %s", error)
        except OSError:
            log.exception("a request is not answered")

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
            case "shown":
                async with self.generations.changing:
                    shown = self.generations.shown.generation
                await self._send(stream, {"generation": shown})
            case "drop":
                await self.generations.drop(request["number"])
                await self._send(stream, {"ok": True})
            case "status":
                await self._send(stream, self.status())
            case "reads":
                await self._send(stream, {"reads": self.vfs.trace.end()})

    def status(self) -> control.Message:
        """Return the state of this mount; sizes in bytes, ``started`` in seconds since the epoch.

        ``apart`` is whether it is in a mount namespace of its own; ``delivery`` is the
        ``Traffic.summary`` of the newest generation; ``kept`` is the ``Kept`` of earlier
        generations that are in use.
        """
        store = self.generations.shown
        return {
            "host": self.task.host,
            "source": self.task.source,
            "mntpoint": self.task.mntpoint,
            "adapter": self.generations.way,
            "generation": store.generation,
            "namespace": points.View.here().namespace,
            "apart": points.apart(),
            "pid": os.getsid(0),
            "server": os.getpid(),
            "started": self.started,
            "files": store.summary.files,
            "size": store.summary.size,
            "held": store.held(),
            "finished": store.finished,
            "memory": _memory(),
            "kept": asdict(self.generations.kept()),
            "delivery": traffic.read(self.directory),
            "verified": verify.last(self.directory),
            "waiting": len(self._waiting),
            "fed": bool(self._feeders),
            "changed": [os.fsdecode(path) for path in store.changed()],
        }

    async def _feed(
        self,
        stream: trio.SocketStream,
        lines: AsyncGenerator[control.Message, None],
        *,
        keep: bool,
    ) -> None:
        feeder = _Feeder(stream)
        self._feeders.append(feeder)
        self._fed.set()
        self._failed.clear()
        self._keep(keep)
        try:
            async for message in lines:
                if "have" in message:
                    self._wake(message["have"])
                elif "failed" in message:
                    self._failed[message["failed"]] = message["reason"]
                    self._wake(message["failed"])
                elif "keep" in message:
                    keep = message["keep"]
                    self._keep(keep)
        except (ValueError, LookupError, TypeError) as error:
            log.warning("malformed message from the delivering agent: %s", error)
        self._feeders.remove(feeder)
        for block in list(self._waiting):  # its readers ask an agent that is left
            self._wake(block)
        if not keep:
            await self._end("the command that made this mount has ended")

    def _keep(self, keep: bool) -> None:
        note = self.directory / BOUND_FILE
        with contextlib.suppress(OSError):  # only a server that takes over reads it
            if keep:
                note.unlink(missing_ok=True)
            else:
                note.touch()

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

    async def _await_viewers(self, mount: points.Mounted) -> None:
        """Wait a moment for views that would lose their server, or their files on a disk, to end.

        The last views of a container end some time after the container. A store in memory needs no
        wait: the kernel keeps it as long as there are views.

        Raises:
            MountError: the views stay.
        """
        for pause in (0.1, 0.4, 1.5, 0):
            found = await trio.to_thread.run_sync(users.viewers, mount)
            if not found:
                return
            await trio.sleep(pause)
        raise MountError(f"{mount.path} is busy: shown by {', '.join(found)}")

    async def _end(self, reason: str) -> None:
        """Unmount as soon as no other mount covers this one."""
        log.info("unmounting: %s", reason)
        while True:
            try:
                await self._unmount(force=True)
            except MountError as error:
                log.warning("%s", error.message)
                await trio.to_thread.run_sync(points.await_change, abandon_on_cancel=True)
            else:
                return

    async def _take_down(self, *, force: bool) -> None:
        mount, bound = points.to_take_down(self.directory), self.generations.bound
        if mount is None:
            return
        if not force and not (bound and bound.owned):
            await self._await_viewers(mount)
        # On a thread, because the kernel may send requests to this server while it unmounts.
        await trio.to_thread.run_sync(lambda: _take_down(mount, force=force))

    async def _unmount(self, *, force: bool) -> None:
        bound, mntpoint = self.generations.bound, self.task.mntpoint
        if bound and not force:
            with trio.move_on_after(GRACE):  # the kernel ends FUSE some time after its last user
                while self.generations.served:
                    await trio.sleep(0.01)
        if bound and self.generations.served and not force:
            raise MountError(
                f"{mntpoint} is busy: files that were opened before all bytes were there are in use"
            )
        async with self.generations.changing:  # a mount that replaces this one would stay
            await self._take_down(force=force)
        self._unmounted.set()
        # The kernel does not end FUSE while users have files open, nor while another namespace has
        # a copy of the mount that could not be unmounted, because another mount covers it.
        with trio.move_on_after(GRACE):
            while self.generations.served:
                await trio.sleep(0.01)
        self.generations.end()


def _stands(directory: Path) -> bool:
    """Return whether a mount stands, or may: that cannot always be found out."""
    try:
        return points.standing(directory) is not None
    except OSError as error:
        log.warning("cannot find out whether the mount stands: %s", error)
        return True


def _take_down(mount: points.Mounted, *, force: bool) -> None:
    """Unmount a mount, and its copies in other namespaces."""
    with contextlib.ExitStack() as holding:
        copied = False
        if mount.kind == points.FILE_SYSTEM:
            with contextlib.suppress(OSError):
                holding.enter_context(views.held(mount))
                copied = True
        points.take_down(mount, force=force)
        if copied:
            views.withdraw(mount)


def _memory() -> int:
    """Return bytes of memory of this process and its supervisor, without the store.

    Shared memory counts in part (``smaps_rollup`` in proc(5)); pages of a tmpfs that
    they have mapped belong to the store.
    """
    total = 0
    for pid in {os.getpid(), os.getsid(0)}:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            kinds = "Pss_Anon:", "Pss_File:"
        except OSError:  # a process that changed its user may not read it
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            kinds = "RssAnon:", "RssFile:"
        total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith(kinds))
    return total


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
        if len(pending) > control.LONGEST:
            raise ValueError("it is too long")
        for line in whole:
            yield control.decode(line)


def main() -> None:
    """Run the serving process: mount, serve, clean up."""
    hold_back()
    directory, ready = Path(sys.argv[1]), int(sys.argv[2])
    logging.basicConfig(
        filename=directory / "log",
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(message)s",
    )
    task = Task.read(directory)
    log.info("serving %s at %s", task.source, task.mntpoint)
    good = False
    try:
        disk.write(directory / PROCESS, f"{os.getpid()}")
        (directory / BOUND_FILE).touch()
        good = (_by_pyfuse3 if task.adapter == "pyfuse3" else _by_devfuse)(directory, task, ready)
    except UnavailableError as error:
        os.write(ready, error.message.encode())
    except OSError as error:
        if (explanation := disk.explain(error, directory)) is None:
            raise
        with contextlib.suppress(OSError):
            os.write(ready, errors.written(explanation).encode())
    except BaseException:
        log.exception("the serving process fails")
        raise
    finally:
        if not good:
            _keep_log(directory)  # the reason stays when the directory is deleted
            with contextlib.suppress(MountError):
                if (mount := points.to_take_down(directory)) is not None:
                    points.take_down(mount, force=True)
        if task.made:
            with contextlib.suppress(OSError):
                Path(task.mntpoint).rmdir()
        if (mount := points.find(task.store)) is not None:
            views.withdraw(mount)  # otherwise other namespaces keep its memory
        stores.remove(Path(task.store))
        shutil.rmtree(directory, ignore_errors=True)
    logging.shutdown()
    os._exit(0 if good else 1)  # who unmounts waits for the end, and Python takes its time


def _keep_log(directory: Path) -> None:
    """Keep the log of a mount that ended with an error, and only the newest of such logs."""
    with contextlib.suppress(OSError):  # another process deletes old logs too; no room
        shutil.copy(directory / "log", f"{directory}.log")
        kept = sorted(directory.parent.glob("*.log"), key=lambda log: log.stat().st_mtime)
        for log_file in kept[:-KEPT_LOGS]:
            log_file.unlink(missing_ok=True)


def _bound_log(directory: Path) -> None:
    with (directory / "log").open("ab") as file:
        logs.bound(file.fileno())


def _owner() -> tuple[int, int]:
    return os.getuid(), os.getgid()


def _remember(directory: Path, task: Task) -> None:
    mount = points.find(task.mntpoint)
    if mount is not None:
        points.remember(directory, (mount.id, mount.device, mount.root))


def _by_pyfuse3(directory: Path, task: Task, ready: int) -> bool:
    import pyfuse3  # an extra, which most hosts do not have

    from wheelmount.mount.serve.fuse.pyfuse import FuseOperations

    server = Server(directory, task)
    forgotten = server.generations.forgotten
    adapter = FuseOperations(server.vfs, server.read, _owner(), forgotten)
    options = {"ro", "default_permissions", "fsname=wheelmount", "subtype=wheelmount"}
    if os.getuid() == 0:
        options.add("allow_other")
    try:
        pyfuse3.init(adapter, task.mntpoint, options)
    except RuntimeError as error:
        raise UnavailableError(str(error)) from None
    _remember(directory, task)
    trio.run(server.serve, adapter, ready)
    return True


def _by_devfuse(directory: Path, task: Task, ready: int) -> bool:
    fd = attach(task.mntpoint)
    _remember(directory, task)
    with contextlib.suppress(OSError):  # only root may set it
        set_read_ahead(task.mntpoint, READ_AHEAD)
    note = directory / "session"

    def store_session(session: Session) -> None:
        disk.write(note, json.dumps(session))

    def serve(resumed: bool) -> None:
        listened = (directory / control.SOCKET).exists()  # one that died had not, maybe
        server = Server(directory, task, resumed=resumed)
        adapter = DirectFuse(
            fd,
            server.vfs,
            server.read,
            _owner(),
            session=json.loads(note.read_text()) if resumed and note.exists() else None,
            on_session=store_session,
            on_forget=server.generations.forgotten,
            counted_from=server.vfs.store.tree.limit,
        )
        trio.run(server.serve, adapter, None if listened else ready)

    return supervise(serve, lambda: _stands(directory))


if __name__ == "__main__":
    main()

"""Run a command of apptainer's, and end all its processes with the command or with its owner.

This process starts before the command, in a session of its own, and ignores all signals but
SIGKILL. Its owner holds the other end of a pipe, so the end of the owner, at any moment, is noticed
here. Processes that the command leaves behind become this process's children, in whatever session
(``PR_SET_CHILD_SUBREAPER``), so that they are found and ended too.

A program of its own that imports next to nothing: every container waits until it runs.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import select
import signal
import struct
import sys
import termios
import time

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2  # linux/seccomp.h
CLONE_NEWUSER = 0x10000000  # linux/sched.h

GRACE = 2.0
"""Seconds in which a stopped container may end by itself; less than a host's actor allows."""

POLL_INTERVAL = 0.02
"""Seconds between checks for remaining processes."""


def main(
    owner: int,
    stays: bool,
    terminal: bool,
    confined: bool,
    directory: str,
    ids: str,
    locks: str,
    command: list[str],
) -> int:
    """Run the command, and end its processes.

    Args:
        owner: descriptor of the pipe whose other end the owner holds; a byte in it ends the
            command.
        stays: keep the processes that remain when the command succeeds: an instance.
        terminal: standard input is a terminal, which becomes the command's controlling terminal.
        confined: disable ``clone3`` for the command, see `_forget_clone3`.
        directory: private directory of the container, to delete if the owner is gone; or empty.
        ids: user and group ids of a user namespace for the command, see ``apptainer.own_ids``;
            empty for none.
        locks: descriptors, with commas between them, of files whose times are set if the owner is
            gone: they were in use until then.
        command: program and arguments.

    Returns:
        The command's exit code; 128 and the signal's number where one ended it.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        # With a handler, because the command would inherit an ignored signal.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    woken, waking = os.pipe()
    for descriptor in (woken, waking):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(waking)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    os.set_inheritable(owner, False)
    if directory:  # in use, even if the owner ends
        fcntl.flock(os.open(directory, os.O_RDONLY), fcntl.LOCK_SH)
    if select.select([owner], [], [], 0)[0]:  # it has ended before the command began
        return _leave(owner, directory, locks)
    child = _start(command, terminal, confined, ids)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # its reader waits only for the command
        os.dup2(nothing, descriptor)
    code = None
    while code is None:
        ready, _, _ = select.select([owner, woken], [], [])
        if owner in ready:
            _end(child)
            _reap(child)
            return _leave(owner, directory, locks)
        os.read(woken, 4096)
        code = _reap(child)
    if not (stays and code == 0):
        _end(child)
    return code


def _leave(owner: int, directory: str, locks: str) -> int:
    """Delete the remains of a command if its owner is gone, and note when it ended.

    Returns:
        The exit code.
    """
    if os.read(owner, 1):
        return 128 + signal.SIGKILL
    for lock in filter(None, locks.split(",")):
        try:
            os.utime(int(lock))
        except OSError:  # its file system fails; the rest is deleted nevertheless
            pass
    if directory:
        os.chdir("/")  # Python imports from its working directory, which others may write to
        where = [sys.executable, "-m", "wheelmount.containers.leftovers", directory]
        os.execv(where[0], where)  # noqa: S606
    return 128 + signal.SIGKILL


def _start(command: list[str], terminal: bool, confined: bool, ids: str) -> int:
    ready, made = os.pipe()
    go, mapped = os.pipe()
    child = os.fork()
    if child:
        os.close(made)
        os.close(go)
        try:
            if ids and os.read(ready, 1):
                _map(child, ids)
                os.write(mapped, b"x")
        except OSError as error:  # and the command does not start
            os.write(2, f"{command[0]}: its users cannot be mapped: {error.strerror}\n".encode())
        finally:
            os.close(ready)
            os.close(mapped)
        return child
    try:
        os.setsid()
        os.close(mapped)
        if ids:
            _own_users()
            os.write(made, b"x")
            if not os.read(go, 1):
                os._exit(255)
            os.setgid(0)
            os.setuid(0)
        if terminal:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        if confined:
            _forget_clone3()
        os.execvp(command[0], command)  # noqa: S606
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def _own_users() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUSER) != 0:
        raise OSError(ctypes.get_errno(), "a user namespace cannot be made")


def _map(child: int, ids: str) -> None:
    """Say which users a child's namespace has; for which ``newuidmap`` needs real root."""
    for kind, lines in zip(("uid", "gid"), ids.split("\n\n"), strict=True):
        with open(f"/proc/{child}/{kind}_map", "w", encoding="ascii") as file:
            file.write(lines.rstrip("\n") + "\n")


def _forget_clone3() -> None:
    """Make ``clone3`` fail as an unknown system call in this process and all that it starts.

    ``clone3`` makes namespaces like ``clone``, but has its flags in memory, where no filter can
    check them. C libraries fall back to ``clone`` only on "no such system call", and apptainer's
    own profile can only answer "not permitted". Needs root.
    """
    number = 435  # on all architectures
    lines = (
        (0x20, 0, 0, 0),  # load the number of the system call
        (0x54, 0, 0, 0xBFFFFFFF),  # less the bit of x32
        (0x15, 0, 1, number),  # if it is another, pass over the next line
        (0x06, 0, 0, 0x00050000 | errno.ENOSYS),
        (0x06, 0, 0, 0x7FFF0000),  # let it be
    )
    program = b"".join(struct.pack("HBBI", *line) for line in lines)
    code = ctypes.create_string_buffer(program)
    filters = struct.pack("HP", len(lines), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filters, 0, 0) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise OSError(ctypes.get_errno(), f"system calls cannot be filtered: {reason}")


def _reap(child: int) -> int | None:
    """Reap all ended children; return the exit code of ``child`` if it is among them."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == child:
            ended = os.waitstatus_to_exitcode(status)
            code = ended if ended >= 0 else 128 - ended


def _end(session: int) -> None:
    """End remaining processes: by SIGTERM, and after a while by SIGKILL."""
    left = _left(session)
    if not left:
        return
    try:
        os.killpg(session, signal.SIGTERM)
    except ProcessLookupError:
        pass
    deadline = time.monotonic() + GRACE
    while left:
        if time.monotonic() > deadline:
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    pass
            if time.monotonic() > deadline + GRACE:  # another user's, which ends with its namespace
                return
        time.sleep(POLL_INTERVAL)
        _reap(session)
        left = _left(session)


def _left(session: int) -> list[int]:
    """Return running processes that descend from this one or belong to the command's session."""
    above: dict[int, int] = {}
    found = set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                # The name, in brackets, may hold anything; state, parent, group, session follow.
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if fields[0] in (b"Z", b"X"):
            continue
        above[int(name)] = int(fields[1])
        if int(fields[3]) == session:
            found.add(int(name))
    own = os.getpid()
    for pid in above:
        line = []
        each = pid
        while each in above and each not in found and each != own:
            line.append(each)
            each = above[each]
        if each in found or (each == own and line):
            found.update(line)
    found.discard(own)
    return sorted(found)


if __name__ == "__main__":
    pipe, stay, tty, limits, place, users, held, *words = sys.argv[1:]
    given = stay == "stays", tty == "terminal", limits == "confined"
    sys.exit(main(int(pipe), *given, place, users, held, words))

"""Set-up of Monarch in this process: its settings, output, futures and failures.

The settings are environment variables, as only those reach all processes that Monarch starts. In
wheelmount's own processes they stay set. In a user's program they are set while Monarch reads them;
then the program's environment and its settings of Monarch are restored.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import functools
import logging
import math
import os
import re
import tempfile
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from wheelmount.errors import HostError, WaitError, WheelmountError
from wheelmount.hosts import process, socketguard
from wheelmount.hosts.address import HOST, OPEN, SECURE, Address
from wheelmount.variables import NO_BACKTRACES, TLS

if TYPE_CHECKING:  # cryptography takes its time
    from wheelmount.hosts.credentials import Authority, Identity

log = logging.getLogger("wheelmount")

FOR_EVER = "3650d"
"""A time-out of Monarch that never ends."""

SILENCE_LIMIT = 30.0
"""Seconds without a word from a host after which Monarch takes it for dead. Hosts come back that
swap, wait for a file system, or are suspended."""

SWITCHES = {
    "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE": f"{SILENCE_LIMIT:.0f}s",
    # A process that died is noticed after a second or two; by default after ten.
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "1s",
    # By default calls to actors whose client has ended fail after 2 minutes. Those of a session
    # are called by later clients, and some calls take days.
    "HYPERACTOR_MESH_SUPERVISION_WATCHDOG_TIMEOUT": FOR_EVER,
    # RDMA's fallback over TCP is four times faster with these three, slower with only some.
    "MONARCH_RDMA_TCP_FALLBACK_PARALLELISM": "4",
    "MONARCH_RDMA_MAX_CHUNK_SIZE_MB": "4",
    "HYPERACTOR_MESSAGE_ACK_EVERY_N_MESSAGES": "1",
    # Its log grows by tens of megabytes an hour at the default level.
    "MONARCH_FILE_LOG_LEVEL": "error",
}

VARIABLES_ONLY = "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "MONARCH_FILE_LOG_LEVEL"
"""The switches that Monarch's ``configure`` does not know. Environment variables win over
``configure``, so the other switches are not set in a user's environment."""

POLL, SILENCE = (
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY",
    "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE",
)
"""The switches for the time between two questions whether a host's processes run, and for the time
in which the host has to answer."""

AT_ONCE = 32
"""Hosts that may be asked in each second. Each has up to seven processes and actors, and to ask
for one takes a millisecond (``benchmarks.clients``): a quarter of a processor in all."""

NAME = "wheelmount_"
"""Prefix of the names of wheelmount's processes and actors, which tells their failures from the
user's."""

UNDELIVERABLE = f"undeliverable message for {NAME}"
"""Text of a failure report about a call to an actor of wheelmount's that has ended."""

NO_AGENT = re.compile(
    r"undeliverable message to host_agent\..*^\s*dest: \S+@\w+:(?://)?(\S+)$", re.M | re.S
)
"""Text of a failure report about a call to a host without an agent, with the host's address."""

LATE_PROCESS = re.compile(r"error spawning proc mesh: .*\bTimeout\(([\d.]+)s\)")
"""Text of an error of Monarch's, with the seconds in which a process did not start. A process that
takes more than 30 s never counts as started (Monarch 0.7), whatever Monarch's time-outs are."""

LOGGER = "logger-"
"""Prefix of the names of the actors that forward the output of Monarch's processes."""

M_ARENA_MAX = -8  # malloc.h

ARENAS = 2
"""Maximum of glibc's memory pools for threads, in wheelmount's own processes."""

MESH_TIMEOUT = 5.0
"""Seconds in which all processes and actors have to stop."""

STOP_TIMEOUT = 3.0
"""Seconds in which Monarch has to end in this process."""

POLL_INTERVAL = 1.0
"""Seconds between checks, during a call, that its hosts still run."""

LOST_INTERVAL = 3.0
"""Seconds between searches, during a call, for hosts that have died. The first search comes after
``POLL_INTERVAL``."""

LOST_COST = 0.02
"""Seconds by which each host without an answer delays the next search, as looking at one takes some
tenths of a millisecond."""

QUIT_DELAY = 0.2
"""Seconds in which a process that ends can still send its answer."""

FLUSH = 0.05
"""Seconds in which Monarch, as it ends, sends its last messages; it takes them twice."""

Key = TypeVar("Key")
Checks = tuple[Callable[[], None], ...]
_lock = threading.Lock()
_started = False
_kept = False  # whether this process goes on to use Monarch without its present hosts
_address: Address | None = None
_found: Address | None = None
_authority: Authority | None = None
_identity: dict[str, str] = {}
_checks: contextvars.ContextVar[Checks] = contextvars.ContextVar("checks", default=())
_attached: set[str] = set()  # addresses, without their schemes, of hosts that were reached
_without_agent: set[str] = set()  # those of them to which a message was lost since
_watched_hosts = 0  # the most that were to be asked whether they run
_own = False
_hook_before: Callable[[Any], object] | None = None

ADDRESS = "HYPERACTOR_MESH_DEFAULT_TRANSPORT"
"""Monarch's variable for the address at which a host's processes listen. Processes that they start
inherit it, and it wins over what the client sends."""


def restrict(transport: str) -> None:
    """Select whether this process reads each ``RDMABuffer`` by RDMA devices.

    Must be called before the first buffer is read.

    Args:
        transport: the setting: ``rdma`` for devices only, ``tcp`` for no devices, or ``auto``.
    """
    from monarch.config import configure

    configure(rdma_allow_tcp_fallback=transport != "rdma", rdma_disable_ibverbs=transport == "tcp")


def own_process() -> None:
    """Declare this process to be wheelmount's own, before Monarch is imported.

    Sets Monarch's switches in the environment, which processes that it starts inherit; and no
    failure of an actor ends this process.
    """
    global _own
    _own = True
    for name, value in SWITCHES.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault(*NO_BACKTRACES)
    # Else glibc keeps memory apart for many of the threads that pass output of hosts on.
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, ARENAS)


def start(address: Address | None = None, authority: Authority | None = None) -> None:
    """Start Monarch in this process, unless it runs.

    Args:
        address: where hosts reach this process, with port 0. Default: a Unix socket, or the
            present address if Monarch runs. Monarch's own default, the address of the machine's
            name, is often unreachable for other machines.
        authority: issues this process's certificate, and those that hosts must show, if the address
            is secure.

    Raises:
        HostError: Monarch cannot start here, or was started with another address.
    """
    global _started, _address, _authority
    with _lock:
        if _started:
            if address not in (None, _address) or not _same(authority):
                raise HostError(
                    "this process has hosts already that are reached in another way",
                    hint="use hosts of one kind in one process",
                )
            return
        lacking = {name: SWITCHES[name] for name in VARIABLES_ONLY if name not in os.environ}
        with quiet(), variables({**lacking, process.TEMPORARY: _temporary()}):
            socketguard.close()
            import monarch.actor
            from monarch._rust_bindings.monarch_hyperactor.config import reload_config_from_env
            from monarch.config import configure

            reload_config_from_env()  # it may have been imported before
            configure(  # of what a user's program may say otherwise later
                rdma_tcp_fallback_parallelism=4,
                rdma_max_chunk_size_mb=4,
                message_ack_every_n_messages=1,
                get_proc_state_max_idle=SWITCHES[SILENCE],
            )
            _pass_over_own_failures()
            try:
                if address is not None:
                    if authority is not None and address.scheme == SECURE:
                        identify(authority.issue(address.names()))
                    monarch.actor.enable_transport(str(address))
                monarch.actor.context()
                find_address()
            except Exception as error:
                monarch.actor.unhandled_fault_hook = _hook_before
                raise HostError(
                    f"Monarch does not start: {last_line(error)}",
                    hint="look at the installation of torchmonarch",
                ) from None
        _started, _address, _authority = True, address, authority


def _same(authority: Authority | None) -> bool:
    if authority is None or _authority is None:
        return authority is None or _address is None
    return authority.certificate == _authority.certificate


def _pass_over_own_failures() -> None:
    """Ignore failures of wheelmount's actors in Monarch's fault hook.

    Calls to a failed actor raise errors, which is enough. Monarch's default for any actor is to
    raise KeyboardInterrupt in the main thread. Failures of other actors go to the previous hook.
    """
    import monarch.actor

    global _hook_before
    before = _hook_before = monarch.actor.unhandled_fault_hook

    def hook(failure: Any) -> object:
        ours = _concerns_wheelmount(failure)
        return True if _own or ours else before(failure)

    monarch.actor.unhandled_fault_hook = hook


def _concerns_wheelmount(failure: Any) -> bool:
    """Whether a failure is of an actor of wheelmount's, or of a host that wheelmount reached.

    Notes a host that has no agent, for ``check_agents``.
    """
    # By the name, as a report need not name the class of the actor: where a host has another
    # version, the actor has none. A process that fails is reported for its logger as well, and
    # a call to an actor or to a host that has failed as a failure of this process.
    if failure.mesh_name.startswith((NAME, LOGGER)):
        return True
    report = failure.report()
    call = NO_AGENT.search(report)
    if call is not None and call[1] in _attached:
        _without_agent.add(call[1])
        return True
    return UNDELIVERABLE in report


@contextlib.contextmanager
def variables(given: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables during the context, and then restore their values."""
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _temporary() -> str:
    """Return a directory for Monarch's sockets that is removed even if this process is killed."""
    kind = f"wheelmount-client-{os.getuid()}-"
    return str(process.make_directory(Path(tempfile.gettempdir()), kind))


@contextlib.contextmanager
def to_stay() -> Iterator[None]:
    """Keep what this process starts on hosts running after it ends; enter before ``start``.

    During the context, actors can be called whose starting process has ended. Leaving the context
    ends Monarch in this process, except after ``keep``.
    """
    from monarch.config import configure, get_global_config

    now = get_global_config()
    before = {name: now[name] for name in ("mesh_orphan_timeout", "supervision_watchdog_timeout")}
    configure(**dict.fromkeys(before, FOR_EVER))
    try:
        yield
    finally:
        stop()
        configure(**before)


def identify(certificate: Identity, *, others: bool = False) -> None:
    """Make Monarch show a certificate, and demand certificates from its peers.

    Args:
        certificate: for the address at which this process is reached.
        others: leave the certificate in the environment, for processes that this one starts.
    """
    from monarch._rust_bindings.monarch_hyperactor.config import reload_config_from_env

    if others:
        os.environ.update(certificate)
    else:
        _identity.update(certificate)
    with variables(certificate):
        reload_config_from_env()


def address() -> Address | None:
    """Return where other machines reach this process, with port 0; None if they do not."""
    if _address is not None:
        return _address
    scheme, _, rest = os.environ.get(ADDRESS, "").partition("://")
    host = rest.rpartition(":")[0].strip("[]")
    return Address(scheme, host, 0) if scheme in (SECURE, OPEN) and host else _found


def find_address() -> None:
    """Learn this process's address from Monarch, in an actor or after Monarch has started.

    In a user's program, and on hosts that such a program started, there is no other source.
    """
    global _found
    from monarch.actor import context

    # As in name<id>@process<id>.tcp://HOST:PORT.
    match = re.search(rf"\b(tcp|tls)://({HOST}):\d+$", str(context().actor_instance.actor_id))
    if match is None:
        return
    scheme, host = match[1], match[2].strip("[]")
    if scheme == OPEN or identity().get(TLS[0], "").startswith("-----BEGIN"):
        _found = Address(scheme, host, 0)


def identity() -> Mapping[str, str]:
    """Return the certificate of this process, as ``Authority.issue`` does; may be empty."""
    return _identity or os.environ


def expect(hosts: int) -> None:
    """Have Monarch ask less often whether hosts run, if there are many.

    Args:
        hosts: their number; only the largest one counts that was given so far.
    """
    global _watched_hosts
    before, _watched_hosts = _watched_hosts, max(_watched_hosts, hosts)
    if _watched_hosts > max(before, AT_ONCE):
        ask_every(_watched_hosts / AT_ONCE)


def ask_every(seconds: float) -> None:
    """Set the time between two questions of Monarch whether a host's processes run.

    Values that are set in the environment stay.

    Args:
        seconds: the time; a host may take a quarter of it longer to answer, as all are asked at
            the same time.
    """
    from monarch._rust_bindings.monarch_hyperactor.config import reload_config_from_env

    silence = SILENCE_LIMIT + seconds / 4
    values = {POLL: f"{seconds * 1e3:.0f}ms", SILENCE: f"{silence * 1e3:.0f}ms"}
    given = {name for name in values if os.environ.get(name, SWITCHES[name]) != SWITCHES[name]}
    lacking = {name: SWITCHES[name] for name in VARIABLES_ONLY if name not in os.environ}
    changed = {name: value for name, value in values.items() if name not in given}
    with variables({**lacking, **_identity, **changed}):
        reload_config_from_env()


def attach(address: str) -> Any:
    """Return a mesh of one running host; its ``initialized`` ends when the host has answered."""
    start()
    from monarch.actor import attach_to_workers

    place = address.partition("://")[2]
    _attached.add(place)
    _without_agent.discard(place)
    return attach_to_workers(ca="trust_all_connections", workers=[address])


def check_agents(addresses: Iterable[str]) -> None:
    """Check that Monarch has reported no lost message to these hosts since ``attach``.

    A call never ends if its message was lost.

    Raises:
        HostError: a message was lost; the host may have an agent by now.
    """
    if _without_agent.intersection(address.partition("://")[2] for address in addresses):
        raise HostError("a host listens and has no agent yet")


def keep() -> None:
    """Let Monarch run until this process ends, as more hosts may follow."""
    global _kept
    _kept = True


def stop(*, killed: bool = False) -> None:
    """End Monarch in this process; hosts go on. Bounded.

    Monarch cannot start in the same process again. Does nothing after ``keep``, or if Monarch does
    not run.

    Args:
        killed: whether all hosts were killed, so that no last message has a receiver.
    """
    global _started
    with _lock:
        if not _started or _kept:
            return
        _started = False
        import monarch.actor

        with quiet(), contextlib.suppress(Exception):
            # Some milliseconds; where a host is lost, or stays, all that it is given.
            flush = 0.0 if killed else FLUSH
            monarch.actor.shutdown_context(host_timeout=flush).get(timeout=STOP_TIMEOUT)
        monarch.actor.unhandled_fault_hook = _hook_before


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Discard what native code prints to standard error during the context."""
    saved = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)


def gather(
    futures: Mapping[Key, Any],
    timeout: float | None,
    ended: Callable[[Key, Any], object] = lambda _key, _result: None,
    lost: Callable[[Iterable[Key]], Awaitable[Mapping[Key, WheelmountError]]] | None = None,
) -> dict[Key, Any]:
    """Wait for calls to several hosts.

    Args:
        futures: Monarch futures by any key.
        timeout: seconds for all calls together; None where the user's own work is awaited (a host
            that dies ends the wait all the same).
        ended: called with the key and the result, or error, of each call at its end.
        lost: called now and then (``LOST_INTERVAL``) with the keys of calls that have not ended;
            returns errors of those that never will. Monarch itself may need half a minute.

    Returns:
        For each key what the call returned, or the ``WheelmountError`` it ended with.
    """
    results: dict[Key, Any] = {}

    async def everything() -> None:
        # One timer for all: a thousand calls with some each would take most of the time.
        loop, all_ended = asyncio.get_running_loop(), asyncio.Event()
        deadline = math.inf if timeout is None else loop.time() + timeout
        waiting: dict[Key, asyncio.Future[Any]] = {}

        def end(key: Key, result: Any) -> None:
            if key not in results:
                results[key] = result
                ended(key, result)
            if len(results) == len(futures):
                all_ended.set()

        def answered(key: Key, call: asyncio.Future[Any]) -> None:
            if not call.cancelled():
                error = call.exception()
                end(key, translate(error) if isinstance(error, Exception) else call.result())

        try:
            for key, future in futures.items():
                waiting[key] = asyncio.ensure_future(future.as_asyncio())
                waiting[key].add_done_callback(functools.partial(answered, key))
            look = loop.time() + LOST_COST * len(futures)
            while len(results) < len(futures):
                bound = min(POLL_INTERVAL, max(0.0, deadline - loop.time()))
                try:
                    await asyncio.wait_for(all_ended.wait(), bound)
                except (TimeoutError, asyncio.TimeoutError):
                    error = _check() or (silence(timeout or 0) if loop.time() > deadline else None)
                    if error is not None:
                        for key in futures:
                            end(key, error)
                    elif lost is not None and loop.time() > look:
                        silent = [key for key in futures if key not in results]
                        for key, error in (await lost(silent)).items():
                            end(key, error)
                        look = loop.time() + LOST_INTERVAL + LOST_COST * len(silent)
        finally:
            for call in waiting.values():
                call.cancel()

    complete(everything())
    return {key: results[key] for key in futures}


def _check() -> WheelmountError | None:
    """Return the error of a check of ``watching``."""
    try:
        for check in _checks.get():
            check()
    except Exception as error:
        return translate(error)
    return None


async def answer(
    future: Any,
    timeout: float | None,
    lost: Callable[[], Awaitable[WheelmountError | None]] | None = None,
    due: float = 0.0,
) -> Any:
    """Wait for one call in an event loop.

    Args:
        future: of Monarch.
        timeout: seconds.
        lost: called now and then (``LOST_INTERVAL``) while the call has not ended; returns an error
            if it never will.
        due: seconds in which a host in order may answer: ``lost`` is not called earlier.

    Raises:
        WheelmountError: the call failed.
    """
    try:
        return await asyncio.wait_for(_watched(future.as_asyncio(), lost, due), timeout)
    except Exception as error:
        raise translate(error, timeout) from None


async def _watched(
    call: Awaitable[Any], lost: Callable[[], Awaitable[WheelmountError | None]] | None, due: float
) -> Any:
    waiting = asyncio.ensure_future(call)
    loop = asyncio.get_running_loop()
    look = loop.time() + due
    try:
        while not (await asyncio.wait({waiting}, timeout=POLL_INTERVAL))[0]:
            for check in _checks.get():
                check()
            if lost is not None and loop.time() > look:
                if (error := await lost()) is not None:
                    raise error
                look = loop.time() + LOST_INTERVAL
        return waiting.result()
    finally:
        waiting.cancel()


@contextlib.contextmanager
def watching(check: Callable[[], None]) -> Iterator[None]:
    """End all calls that the context awaits with an error once their hosts are gone.

    Monarch does not end calls to actors that another client stops meanwhile.

    Args:
        check: raises the error; called every ``POLL_INTERVAL`` seconds while a call is awaited.
    """
    with watched((*checks(), check)):
        yield


def checks() -> Checks:
    """Return the checks of the present contexts of ``watching``."""
    return _checks.get()


@contextlib.contextmanager
def watched(checks: Checks) -> Iterator[None]:
    """Have only these checks during the context, for calls to other hosts or in another thread."""
    before = _checks.get()
    _checks.set(checks)
    try:
        yield
    finally:
        _checks.set(before)


def complete(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end, also in a thread whose event loop runs already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(work)
    else:  # of a notebook, for example
        with ThreadPoolExecutor(1, initializer=_checks.set, initargs=(checks(),)) as thread:
            thread.submit(asyncio.run, work).result()


async def in_thread(begin: Callable[[], object], undo: Callable[[], object]) -> None:
    """Begin something in a thread, for a context whose end is not called if this is cancelled.

    A thread cannot be cancelled. The cancellation goes on when the thread has ended and what it
    began is undone, so that nothing stays without an owner; the event loop goes on meanwhile.

    Args:
        begin: called in a thread; its error is raised.
        undo: called in a thread if ``begin`` succeeds after all; its error is logged.
    """
    beginning = _thread(begin)
    try:
        await asyncio.wait({beginning})
    except asyncio.CancelledError:
        if await _failure(beginning) is None and (error := await _failure(_thread(undo))):
            log.warning("what was cancelled could not be undone: %s", error)
        raise
    beginning.result()


def _thread(work: Callable[[], object]) -> asyncio.Future[object]:
    """Start work as ``asyncio.to_thread`` does, but in no task: the end of a loop cancels tasks."""
    copy = contextvars.copy_context()  # Monarch's, in an actor
    return asyncio.get_running_loop().run_in_executor(None, copy.run, work)


async def _failure(work: asyncio.Future[object]) -> BaseException | None:
    """Wait for the end of work even if this wait is cancelled; return its error, if any."""
    while not work.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({work})
    return work.exception()


def errors(results: Mapping[Key, Any]) -> dict[Key, WheelmountError]:
    """Return the errors among the results of ``gather``."""
    return {key: end for key, end in results.items() if isinstance(end, WheelmountError)}


def raise_first(results: dict[Key, Any]) -> dict[Key, Any]:
    """Return the results of ``gather``, or raise the first error among them, naming its key."""
    for key, result in results.items():
        if isinstance(result, WheelmountError):
            if not result.message.startswith(f"{key}: "):
                result.message = f"{key}: {result.message}"
            raise result
    return results


def one(future: Any, timeout: float) -> Any:
    """Wait for one call.

    Raises:
        WheelmountError: the call failed.
    """
    result = gather({"": future}, timeout)[""]
    if isinstance(result, WheelmountError):
        raise result
    return result


def quit_soon() -> None:
    """End this process of a host after its present call is answered.

    Monarch lets only the client that started a process stop it.
    """
    asyncio.get_running_loop().call_later(QUIT_DELAY, os._exit, 0)


def end_processes(actors: Mapping[Key, Any]) -> None:
    """Call ``quit`` of actors, which end their processes by ``quit_soon``.

    The wait is short, as answers may be lost with the processes. Actors that are gone are passed
    over.
    """
    gather({key: actor.quit.call_one() for key, actor in actors.items()}, MESH_TIMEOUT)


def stop_meshes(*meshes: Any) -> None:
    """Stop processes or actors of Monarch; bounded. Those that are gone are passed over."""
    gather({number: mesh.stop() for number, mesh in enumerate(meshes)}, MESH_TIMEOUT)


def translate(error: Exception, timeout: float | None = None) -> WheelmountError:
    """Return the error of wheelmount's that a failed call stands for."""
    from monarch.actor import ActorError

    if isinstance(error, WheelmountError):
        return error
    if isinstance(error, ActorError):
        cause = getattr(error, "exception", None)
        if isinstance(cause, WheelmountError):
            return cause
        return HostError(
            f"a host failed: {type(cause).__name__}: {cause}", hint="look at the host's log"
        )
    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        return silence(timeout or 0)
    reason = last_line(error)
    if late := LATE_PROCESS.search(reason):
        return WaitError(
            f"a process did not start within {float(late[1]):.0f} s",
            hint="the host may be overloaded or lost, or slow to read the files of Python",
        )
    return HostError(f"the host died or is out of reach: {reason}")


def silence(timeout: float) -> WaitError:
    """Return the error for a host that has not answered within ``timeout`` seconds."""
    return WaitError(f"no answer within {timeout:g} s", hint="the host may be overloaded or lost")


def last_line(error: Exception) -> str:
    """Return the last line before Monarch's backtrace, which tells the cause."""
    text = str(error).partition("Stack backtrace:")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__

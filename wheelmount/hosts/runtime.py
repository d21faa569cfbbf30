"""Monarch, set up once: its switches, its noise, its futures and its failures.

Everything that touches Monarch's own settings stands here. The switches are environment variables,
as only those reach all processes that Monarch starts. In a process of wheelmount's own they stay;
in a program of the user's they are there while Monarch reads them, and what that program made of
its environment and of Monarch is given back.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
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

FOR_EVER = "3650d"
"""A time-out of Monarch that does not come."""

SWITCHES = {
    # A host that was killed is noticed after 70 s by default, after 4 s with these two.
    "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE": "3s",
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
"""Those that Monarch's ``configure`` does not know; what it knows would not count beside them."""

NAME = "wheelmount_"
"""Prefix of the names of wheelmount's own processes and actors, by which their failures are told
from those of the user's."""

UNDELIVERABLE = f"undeliverable message for {NAME}"
"""What a report says of a call to an actor of wheelmount's that is not there any more."""

NO_AGENT = re.compile(
    r"undeliverable message to host_agent\..*^\s*dest: \S+@\w+:(?://)?(\S+)$", re.M | re.S
)
"""What a report says of a call to a host that has no agent yet or any more, with its address."""

LOGGER = "logger-"
"""Prefix of the name of the actor that Monarch adds to each process to pass its output on."""

M_ARENA_MAX = -8  # malloc.h

ARENAS = 2
"""Pools that glibc keeps memory of threads in, at most, in a process of wheelmount's own."""

MESH_TIMEOUT = 5.0
"""Seconds that processes and actors have to stop, all together."""

STOP_TIMEOUT = 3.0
"""Seconds that Monarch has to end in this process."""

GLANCE = 1.0
"""Seconds between looks at whether the hosts are still there that a call is made to."""

QUIT_DELAY = 0.2
"""Seconds in which an answer leaves a process that ends."""

FLUSH = 0.05
"""Seconds that Monarch then has to bring away what it has still to say, twice."""

Key = TypeVar("Key")
_lock = threading.Lock()
_started = False
_kept = False  # whether this process uses Monarch after the hosts of now
_address: Address | None = None
_found: Address | None = None
_authority: Authority | None = None
_identity: dict[str, str] = {}
_checks: list[Callable[[], None]] = []
_attached: set[str] = set()  # addresses, without their schemes, of hosts that were reached
_without_agent: set[str] = set()  # those of them to which a message was lost since
_own = False
_hook_before: Callable[[Any], object] | None = None

ADDRESS = "HYPERACTOR_MESH_DEFAULT_TRANSPORT"
"""Variable of Monarch that says where a host's processes listen. It goes to what they start, and
beats what the client tells them of itself."""


def restrict(transport: str) -> None:
    """Have this process read each ``RDMABuffer`` by devices alone, or by none.

    To be called before the first one is read.

    Args:
        transport: as in the settings.
    """
    from monarch.config import configure

    configure(rdma_allow_tcp_fallback=transport != "rdma", rdma_disable_ibverbs=transport == "tcp")


def own_process() -> None:
    """Say that this process is wheelmount's own, before Monarch is imported.

    Its environment, and so that of all that it starts, has Monarch's switches from here on; and no
    failure of an actor ends it.
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
    """Have Monarch ready in this process. Cheap when called again.

    Args:
        address: where hosts reach this process, with port 0; default a socket of this machine,
            and what it was if it is ready already. Monarch by itself would listen at what the
            machine's own name stands for, which often is an address of no use to others.
        authority: whose certificates are asked for and shown there, if the address is secure.

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
                get_proc_state_max_idle="3s",
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
    """Have failures of wheelmount's actors not end this process.

    Calls to such an actor fail, and that says it. What Monarch does by default, for any actor, is
    to raise KeyboardInterrupt in the main thread, wherever that may be. Failures of other actors
    go where they went before.
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
    """Have variables in the environment meanwhile, and then what was there before."""
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
    """Have the directory that Monarch makes as it starts, for sockets, go if this is killed."""
    kind = f"wheelmount-client-{os.getuid()}-"
    return str(process.make_directory(Path(tempfile.gettempdir()), kind))


@contextlib.contextmanager
def to_stay() -> Iterator[None]:
    """Have what this process starts on hosts go on when it ends; entered before ``start``.

    Actors that another process started so, and that has ended since, can be called meanwhile.
    Leaving it ends Monarch in this process, unless it is kept.
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
    """Have Monarch show a certificate for an address of this machine, and ask others for theirs.

    Args:
        certificate: for where this process is reached.
        others: leave it in the environment, for the processes that this one starts.
    """
    from monarch._rust_bindings.monarch_hyperactor.config import reload_config_from_env

    if others:
        os.environ.update(certificate)
    else:
        _identity.update(certificate)
    with variables(certificate):
        reload_config_from_env()


def address() -> Address | None:
    """Where others reach this process, with port 0; None if only this machine does."""
    if _address is not None:
        return _address
    scheme, _, rest = os.environ.get(ADDRESS, "").partition("://")
    host = rest.rpartition(":")[0].strip("[]")
    return Address(scheme, host, 0) if scheme in (SECURE, OPEN) and host else _found


def find_address() -> None:
    """Learn where Monarch is reached in this process; in an actor, or where it has started.

    In a program of the user's own, or on hosts that it started, nothing else tells.
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
    """The certificate that this process shows, as of ``Authority.issue``; it may have none."""
    return _identity or os.environ


def attach(address: str) -> Any:
    """A mesh of one host that runs already; whether it answers, its ``initialized`` tells."""
    start()
    from monarch.actor import attach_to_workers

    place = address.partition("://")[2]
    _attached.add(place)
    _without_agent.discard(place)
    return attach_to_workers(ca="trust_all_connections", workers=[address])


def check_agents(addresses: Iterable[str]) -> None:
    """Check that no message to the agents of hosts was lost since the hosts were attached.

    A call that waits for the answer to a lost message never ends.

    Raises:
        HostError: a message was lost; the host may have an agent by now.
    """
    if _without_agent.intersection(address.partition("://")[2] for address in addresses):
        raise HostError("a host listens and has no agent yet")


def keep() -> None:
    """Leave Monarch to end with this process: more hosts may follow those of now."""
    global _kept
    _kept = True


def stop() -> None:
    """End Monarch in this process; hosts stay. Bounded, and harmless if it was never started.

    Monarch cannot start in the same process again. Does nothing after ``keep``.
    """
    global _started
    with _lock:
        if not _started or _kept:
            return
        _started = False
        import monarch.actor

        with quiet(), contextlib.suppress(Exception):
            # Some milliseconds; where a host is lost, or stays, all that it is given.
            monarch.actor.shutdown_context(host_timeout=FLUSH).get(timeout=STOP_TIMEOUT)
        monarch.actor.unhandled_fault_hook = _hook_before


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what native code prints to standard error out of the user's sight meanwhile."""
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
    failed: Callable[[Key, WheelmountError], object] = lambda _key, _error: None,
) -> dict[Key, Any]:
    """Wait for calls made to several hosts.

    Args:
        futures: Monarch futures by whatever tells them apart.
        timeout: seconds for all of them together; None where the user's own work is waited for
            (a host that dies ends the wait all the same).
        failed: called at once when one ends with an error.

    Returns:
        For each key what the call returned, or the ``WheelmountError`` it ended with.
    """
    results: dict[Key, Any] = {}

    async def one(key: Key, future: Any) -> None:
        try:
            results[key] = await answer(future, timeout)
        except WheelmountError as error:
            results[key] = error
            failed(key, error)

    async def everything() -> None:
        await asyncio.gather(*(one(key, future) for key, future in futures.items()))

    complete(everything())
    return {key: results[key] for key in futures}


async def answer(future: Any, timeout: float | None) -> Any:
    """Wait for one call, among others.

    Args:
        future: of Monarch.
        timeout: seconds.

    Raises:
        WheelmountError: what it ended with.
    """
    try:
        return await asyncio.wait_for(_watched(future.as_asyncio()), timeout)
    except Exception as error:
        raise translate(error, timeout) from None


async def _watched(call: Awaitable[Any]) -> Any:
    waiting = asyncio.ensure_future(call)
    try:
        while not (await asyncio.wait({waiting}, timeout=GLANCE))[0]:
            for check in _checks:
                check()
        return waiting.result()
    finally:
        waiting.cancel()


@contextlib.contextmanager
def watching(check: Callable[[], None]) -> Iterator[None]:
    """Have all calls that this process waits for end with an error once their hosts are gone.

    Monarch does not end calls to actors that were ended in order meanwhile by another client.

    Args:
        check: raises the error; called every ``GLANCE`` seconds in which a call is waited for.
    """
    _checks.append(check)
    try:
        yield
    finally:
        _checks.remove(check)


def complete(work: Coroutine[Any, Any, None]) -> None:
    """Run something asynchronous to its end, also where a loop of the user's own runs already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(work)
    else:  # of a notebook, for example
        with ThreadPoolExecutor(1) as thread:
            thread.submit(asyncio.run, work).result()


def errors(results: Mapping[Key, Any]) -> dict[Key, WheelmountError]:
    """Those of the results of ``gather`` that are errors."""
    return {key: end for key, end in results.items() if isinstance(end, WheelmountError)}


def raise_first(results: dict[Key, Any]) -> dict[Key, Any]:
    """Give the results of ``gather`` back, or raise the first error among them, naming its key."""
    for key, result in results.items():
        if isinstance(result, WheelmountError):
            if not result.message.startswith(f"{key}: "):
                result.message = f"{key}: {result.message}"
            raise result
    return results


def one(future: Any, timeout: float) -> Any:
    """Wait for one call.

    Raises:
        WheelmountError: what it ended with.
    """
    result = gather({"": future}, timeout)[""]
    if isinstance(result, WheelmountError):
        raise result
    return result


def quit_soon() -> None:
    """End a process on a host from within, when what it was asked has been answered.

    Monarch lets processes be stopped only by the client that started them.
    """
    asyncio.get_running_loop().call_later(QUIT_DELAY, os._exit, 0)


def end_processes(actors: Mapping[Key, Any]) -> None:
    """Ask actors to end their processes by ``quit_soon``; bounded, and fine if they are gone.

    The bound is short: the answer may be lost with the process.
    """
    gather({key: actor.quit.call_one() for key, actor in actors.items()}, MESH_TIMEOUT)


def stop_meshes(*meshes: Any) -> None:
    """Stop processes or actors of Monarch; bounded, and fine if they are gone already."""
    gather({number: mesh.stop() for number, mesh in enumerate(meshes)}, MESH_TIMEOUT)


def translate(error: Exception, timeout: float | None = None) -> WheelmountError:
    """What a failed call means, as one of our errors."""
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
    return HostError(f"the host died or is out of reach: {last_line(error)}")


def silence(timeout: float) -> WaitError:
    """The error of a host that has not answered within ``timeout`` seconds."""
    return WaitError(f"no answer within {timeout:g} s", hint="the host may be overloaded or lost")


def last_line(error: Exception) -> str:
    """Return what Monarch says last before its backtrace, where it says what went wrong."""
    text = str(error).partition("Stack backtrace:")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__

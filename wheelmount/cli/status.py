"""``wheelmount status``."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from wheelmount import config
from wheelmount.cli import options
from wheelmount.cli.console import ConsoleProgress, printable
from wheelmount.hosts.names import alike, fold
from wheelmount.mount.serve import traffic
from wheelmount.operations import standing
from wheelmount.progress import number_of

EVERY = 1.0
"""Seconds between looks with --watch."""


@click.command()
@click.option("--watch", is_flag=True, help="Update every second, with rates, until interrupted.")
@click.option("--each", is_flag=True, help="Print a line for each host, even for equal ones.")
@options.as_json
def status(watch: bool, each: bool, as_json: bool) -> None:
    """Show sessions, and mounts on their hosts and on this machine with their progress.

    Hosts in the same state share one line: host[0-15].
    """
    settings = config.load()
    if not watch:
        found = standing.status(settings)
        print(json.dumps(found) if as_json else "\n".join(_lines(found, each)))
        ConsoleProgress().raise_first(standing.unreadable(settings))
        return
    before: dict[tuple[str, str], tuple[float, int]] = {}
    while True:
        found = standing.status(settings)
        _rate(found["mounts"], before)
        if as_json:
            print(json.dumps(found), flush=True)
        else:
            _draw(list(_lines(found, each)))
        time.sleep(EVERY)


def _draw(lines: Sequence[str]) -> None:
    """Print what takes the place of what was printed last, on a terminal."""
    if not sys.stdout.isatty():
        print("\n".join(lines), end="\n\n", flush=True)
        return
    width, height = shutil.get_terminal_size()
    shown = [printable(line)[: width - 1] for line in lines]
    if len(shown) >= height:
        shown = [*shown[: height - 2], f"… {len(shown) - height + 2} more lines"]
    # Back to the top, each line to its end, and nothing below: without a flicker.
    whole = "\x1b[H" + "".join(f"{line}\x1b[K\n" for line in shown) + "\x1b[J"
    sys.stdout.buffer.write(whole.encode(sys.stdout.encoding, "replace"))
    sys.stdout.buffer.flush()


def _rate(
    mounts: Sequence[dict[str, Any]], before: dict[tuple[str, str], tuple[float, int]]
) -> None:
    """Note in records how many bytes a second came since the last look."""
    now = time.monotonic()
    for record in mounts:
        if "held" in record:
            key = standing.mount_key(record)
            last, held = before.get(key, (now, record["held"]))
            record["rate"] = max(0, record["held"] - held) / (now - last) if now > last else 0.0
            before[key] = now, record["held"]


def _lines(found: Mapping[str, Any], apart: bool) -> Iterator[str]:
    for state in found["sessions"]:
        yield _session_line(state)
        said = [
            (
                overlay["host"],
                (overlay["name"], overlay["kind"], f"{overlay['bytes'] / 1e6:.1f} MB"),
            )
            for overlay in state.get("overlays", [])
        ]
        for hosts, (name, kind, size) in said if apart else alike(said):
            yield f"overlay {name}  {hosts}  {kind}  {size}"
    mounts = found["mounts"]
    if not mounts:
        yield "nothing is mounted"
    counts = Counter(record["identity"] for record in mounts)
    for identity in counts:
        of_one = [record for record in mounts if record["identity"] == identity]
        alone = apart or len(of_one) == 1
        if not alone:
            of_one = _arriving_together(of_one)
        said_of = [(record["host"], _words(record, alone=alone)) for record in of_one]
        for hosts, words in said_of if alone else alike(said_of):
            yield "  ".join([identity, hosts, *words])


def _arriving_together(mounts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Say the same of all hosts at which bytes of a mount still arrive, so that they share a line.

    Their bytes are those of the last of them, and their rates those of all together.
    """
    arriving = [each for each in mounts if each.get("held") != each.get("size")]
    if len(arriving) < 2:
        return list(mounts)
    held = min(each["held"] for each in arriving)
    rate = {"rate": sum(each["rate"] for each in arriving)} if "rate" in arriving[0] else {}
    same = {"held": held, "all": True, **rate}
    return [each | same if each in arriving else each for each in mounts]


def _session_line(state: Mapping[str, Any]) -> str:
    if not state["hosts"]:
        return f"session {state['session']}  cannot be used: {state['lost']}"
    words = [f"session {state['session']}: {state['spec']}"]
    words.append(f"up {time.time() - state['created']:.0f} s")
    words.append(fold(state["hosts"]))
    if state["lost"] is not None:
        words.append(f"cannot be used: {state['lost']}")
    return "  ".join(words)


def _words(record: Mapping[str, Any], *, alone: bool) -> tuple[str, ...]:
    """What there is to say of a mount on a host.

    Args:
        record: what is known of it.
        alone: in a line of its own, and not with other hosts of which the same is to be said.
    """
    mntpoint = record["mntpoint"]
    if not alone:
        mntpoint = re.sub(rf"(?<!\w){re.escape(record['host'])}(?!\w)", "{host}", mntpoint)
    words = [f"{record['source']} at {mntpoint}"]
    if "error" in record:
        if record.get("dead"):
            return *words, "dead: `wheelmount umount --force` clears it away"
        # Only on this machine is it known that the mount lives.
        return *words, "does not answer yet" if "dead" in record else record["error"]
    arrived = "complete"
    if record["held"] != record["size"]:
        least, together = ("at least ", " together") if "all" in record else ("", "")
        arrived = f"{least}{record['held'] / 1e6:.1f} MB of it"
        if "rate" in record:
            arrived += f", {record['rate'] / 1e6:.1f} MB/s{together}"
    words.append(f"{number_of(record['files'], 'file')}, {record['size'] / 1e6:.1f} MB, {arrived}")
    if record["waiting"]:
        words.append(f"reads wait for {number_of(record['waiting'], 'block')}")
    if record["delivery"]:
        by = f"by {traffic.describe(record['delivery'])}"
        if alone:
            sources = ", ".join(sorted(record["delivery"]["received"]))
            by += f" from {sources or 'no host'}"
        words.append(by)
        if reused := record["delivery"].get("reused"):
            words.append(f"{reused / 1e6:.1f} MB of it were in other mounts")
        if kept := record["delivery"].get("kept"):
            words.append(f"{kept / 1e6:.1f} MB of it were kept by earlier mounts")
    words.append(f"generation {record['generation']}")
    if kept := record["kept"]["generations"]:
        users = ", ".join(record["kept"]["users"]) or "open files"
        words.append(f"{kept} earlier kept for {users}")
    words.append(record["adapter"])
    if alone:
        words.append(f"up {time.time() - record['started']:.0f} s")
    if not record["visible"]:
        enter = "" if os.getuid() == 0 else "-U --preserve-credentials "
        how = f": nsenter {enter}-m -t {record['pid']}" if alone else " each"
        words.append(f"in a namespace of its own{how}")
    if verified := record.get("verified"):
        words.append(f"verified {time.time() - verified['time']:.0f} s ago")
        if verified["wrong"]:
            words.append(f"damaged: {', '.join(verified['wrong'])}")
    if record["changed"]:
        words.append(f"changed at the source: {', '.join(record['changed'])}")
    return tuple(words)

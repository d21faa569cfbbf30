"""Names of many hosts in few words, as Slurm and ClusterShell write them: ``node[01-16],login``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import TypeVar

from wheelmount.errors import InputError

_Value = TypeVar("_Value", bound=Hashable)

MOST = 1 << 16
"""Names that folded ones may stand for."""


def natural(name: str) -> list[tuple[int, int, str]]:
    """What names are sorted by: ``host2`` before ``host10``."""
    return [
        (0, int(part), part) if part.isdecimal() else (1, 0, part)
        for part in re.split(r"([0-9]+)", name)
        if part
    ]


def distinct(names: Sequence[str], suffixes: Sequence[int]) -> list[str]:
    """Return names that all differ: equal ones get a suffix.

    Args:
        names: the names.
        suffixes: a number for each. Names that are equal with it get their positions as well.
    """
    found = list(names)
    for numbers in chain([suffixes], repeat(range(len(found)))):
        times = Counter(found)
        if len(times) == len(found):
            break
        found = [
            name if times[name] == 1 else f"{name}-{number}"
            for name, number in zip(found, numbers, strict=True)
        ]
    return found


def fold(names: Iterable[str]) -> str:
    """Names in natural order, those that differ in their last number in brackets."""
    found = sorted(set(names), key=natural)
    parts = {name: re.fullmatch(r"(.*?)([0-9]+)([^0-9]*)", name) for name in found}
    # Of `node8` and `node08` only the second has a fixed width, which `node10` may have too.
    fixed = {
        (match[1], match[3], len(match[2]))
        for match in parts.values()
        if match is not None and match[2][0] == "0" and len(match[2]) > 1
    }
    groups: dict[tuple[str, str, int], list[int]] = {}
    for name, match in parts.items():
        if match is None:
            groups[name, "", -1] = []
            continue
        head, number, tail = match.groups()
        width = len(number) if (head, tail, len(number)) in fixed else 0
        groups.setdefault((head, tail, width), []).append(int(number))
    return ",".join(
        head if width < 0 else head + _ranges(numbers, width) + tail
        for (head, tail, width), numbers in groups.items()
    )


def _ranges(numbers: list[int], width: int) -> str:
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = [
        f"{first:0{width}}" if first == last else f"{first:0{width}}-{last:0{width}}"
        for first, last in runs
    ]
    return words[0] if len(numbers) == 1 else f"[{','.join(words)}]"


def expand(text: str) -> list[str]:
    """The names that folded ones stand for, in their order, each once.

    Raises:
        InputError: a name is empty, or a bracket holds no numbers, or far too many.
    """
    names: dict[str, None] = {}
    for part in re.split(r",(?![^\[]*\])", text):
        for name in _each(part, text):
            names[name] = None
            if len(names) > MOST:
                raise InputError(f"{text!r} is more than {MOST} hosts", hint="name fewer")
    return list(names)


def _each(part: str, text: str) -> Iterator[str]:
    match = re.fullmatch(r"([^\[\]]*)\[([0-9,-]+)\]([^\[\]]*)", part)
    if match is None:
        if not part:
            raise InputError(f"{text!r} has an empty name of a host", hint="give HOST,HOST,…")
        if "[" in part or "]" in part:
            raise InputError(
                f"{text!r} does not name hosts", hint="give HOST,HOST,… or HOST[0-3,7]"
            )
        yield part
        return
    head, inner, tail = match.groups()
    for run in inner.split(","):
        numbers = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", run)
        if numbers is None or int(numbers[2] or numbers[1]) < int(numbers[1]):
            raise InputError(f"{run!r} in {text!r} is no range", hint="give one such as 0-3")
        width = len(numbers[1]) if numbers[1][0] == "0" else 0
        for number in range(int(numbers[1]), int(numbers[2] or numbers[1]) + 1):
            yield f"{head}{number:0{width}}{tail}"


def alike(said: Iterable[tuple[str, _Value]]) -> list[tuple[str, _Value]]:
    """Hosts that say the same, folded, with what they say; in the order of the first of each.

    Args:
        said: names of hosts, each with what it says.
    """
    groups: dict[_Value, list[str]] = {}
    for name, words in said:
        groups.setdefault(words, []).append(name)
    return [(fold(names), words) for words, names in groups.items()]

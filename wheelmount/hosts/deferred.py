"""Modules that Monarch imports and hardly ever uses: these are imported when they are first used.

They took a quarter of the processor time of ``import monarch.actor``, which every process of every
host and every command spends (see decision 0077).
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

MODULES = {
    "monarch._src.actor.debugger.debug_controller": "debug_controller",
    "pyre_extensions": "none_throws",
}
"""The function of each module that Monarch (0.7.0) imports by name."""


class Deferred(ModuleType):
    """Takes the place of a module until more of it is used than the name of one function.

    Args:
        name: name of the module.
        function: name of the function, which may be imported; a call imports the module.
    """

    def __init__(self, name: str, function: str) -> None:
        super().__init__(name)

        def call(*arguments: Any, **named: Any) -> Any:
            return getattr(self._load(), function)(*arguments, **named)

        setattr(self, function, call)

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # asked for by ``import`` itself
            raise AttributeError(attribute)
        return getattr(self._load(), attribute)

    def _load(self) -> ModuleType:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return importlib.import_module(self.__name__)


def defer() -> None:
    """Put the modules off that are not imported yet; to be called before Monarch is imported."""
    for name, function in MODULES.items():
        if name not in sys.modules:
            sys.modules[name] = Deferred(name, function)


def end() -> None:
    """Have later imports find the modules themselves; to be called when Monarch is imported."""
    for name in MODULES:
        if isinstance(sys.modules.get(name), Deferred):
            del sys.modules[name]

"""Import paths that the documentation has shown and that have moved: they work until 1.0, with a DeprecationWarning.

What is left of a module that is gone is one line: `__getattr__ = moved(__name__, {name: new module})`.
"""

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def moved(old_module: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a module that names have moved away from; `places`: the new path of each."""

    def __getattr__(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {old_module!r} has no attribute {name!r}")
        new = places[name]
        warnings.warn(f"{old_module}.{name} is {new} now; the old path works until 1.0", DeprecationWarning, 2)
        module, _, attribute = new.rpartition(".")
        return getattr(importlib.import_module(module), attribute)

    return __getattr__

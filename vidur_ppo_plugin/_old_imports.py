"""Import paths that the documentation has shown and that have moved: they work until 1.0, with a DeprecationWarning.

A line of `MOVED` is all it takes where the old module is gone. Where it is still there and only a name has left it, it
also needs `__getattr__ = moved(__name__)`.
"""

import importlib
import warnings
from collections.abc import Callable
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

#: From the old to the present path, each a module and a name in it.
MOVED = {
    "vidur_ppo_plugin.twin.acting.ActingTwin": "vidur_ppo_plugin.twin.policy_twin.PolicyTwin",
}


def find_spec(name: str) -> ModuleSpec | None:
    """The spec of a module that is gone but has moved names; None if it has none."""
    if all(old.rpartition(".")[0] != name for old in MOVED):
        return None
    return ModuleSpec(name, _Loader())


class _Loader(Loader):
    """Makes an empty module that leads to the present places of the names that were in it."""

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its moved names."""
        module.__getattr__ = moved(module.__name__)  # type: ignore[method-assign]


def moved(module_name: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module that names have moved away from."""

    def __getattr__(name: str) -> Any:
        old = f"{module_name}.{name}"
        new = MOVED.get(old)
        if new is None:
            raise AttributeError(f"module {module_name!r} has no attribute {name!r}")
        warnings.warn(f"{old} is {new} now; the old path works until 1.0", DeprecationWarning, stacklevel=2)
        module, _, attribute = new.rpartition(".")
        return getattr(importlib.import_module(module), attribute)

    return __getattr__

"""A PPO-trained global scheduler, honest baselines and an offline predictor for the Vidur simulator.

This file and `_autoload.py` are imported at the start of every interpreter: standard library only.
"""

import sys

# What `typing` says too, without importing it in every interpreter; hence the quoted types.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

__version__ = "0.1.0"


class _OldImports:
    """The last of Python's finders: a module of this package that no other one finds may have an old name."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        """The module of an old import path; None for all others."""
        if not name.startswith("vidur_ppo_plugin."):
            return None
        from vidur_ppo_plugin import _old_imports

        return _old_imports.find_spec(name)


sys.meta_path.append(_OldImports)

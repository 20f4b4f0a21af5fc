"""The start-up hook: loads plugins into Vidur, which has no plugin loading of its own.

`install()` runs at the start of every interpreter (from `vidur_ppo_plugin.pth`), so at module level this file
imports nothing but `sys`, and until Vidur is imported it costs one dictionary look-up per import.

Every installed entry point of the group `vidur.plugins` is a plugin: a re-entrant function without arguments.
It is called in exactly two phases, because importing Vidur's schedulers while its config package is still
being imported fails:

1. after `vidur.config` has executed: plugins may only define config dataclasses (the command-line flags);
2. after each of Vidur's registries has executed: plugins register factories for their types.

The environment variable VIDUR_PLUGINS restricts loading to a comma-separated list of entry-point names;
empty (or `none`) turns it off. A plugin that fails is reported and skipped; a run that needs it stops.
"""

import sys

# What `typing` says too, without importing it (or `__future__`) in every interpreter; hence the quoted types.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

GROUP = "vidur.plugins"
SWITCH = "VIDUR_PLUGINS"
OWN_PLUGIN = ("vidur_ppo", "vidur_ppo_plugin.plugin", "register")

# Our types that are no heuristics; the names of those stand in their table alone, see `own_types`.
_OTHER_TYPES = ("ppo_modular", "roofline", "lognormal", "mixture", "renewal", "replay")

_CONFIG_MODULE = "vidur.config"
_WATCHED = frozenset(
    {
        _CONFIG_MODULE,
        "vidur.scheduler.global_scheduler.global_scheduler_registry",
        "vidur.execution_time_predictor.execution_time_predictor_registry",
        "vidur.request_generator.request_length_generator_registry",
        "vidur.request_generator.request_interval_generator_registry",
        "vidur.request_generator.request_generator_registry",
    }
)

# Gymnasium reads no entry points (since 1.0): with its registry imported, our environments are registered there.
_GYMNASIUM_REGISTRY = "gymnasium.envs.registration"
_OWN_ENVIRONMENTS = "vidur_ppo_plugin.envs"
_FOLLOWED = _WATCHED | {_GYMNASIUM_REGISTRY}

# Functions that plugins add: a parsed command line in (Vidur's flat config), its problems out, a sentence each.
command_line_checks: "list[Callable[[Any], list[str]]]" = []

# Plugins that failed to load: entry-point name -> the exception.
failures: dict[str, Exception] = {}


class _Finder:
    """A meta-path finder that lets Python find the followed modules as usual, and acts after they executed."""

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        if name not in _FOLLOWED:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec: Any = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader:
    """Executes a module with its real loader, puts that loader back, and calls the plugins."""

    def __init__(self, loader: "Any") -> None:
        self._loader = loader

    def create_module(self, spec: "Any") -> "Any":
        return self._loader.create_module(spec)

    def exec_module(self, module: "Any") -> None:
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        _after_import(module.__name__)

    def __getattr__(self, name: str) -> "Any":
        return getattr(self._loader, name)


def install() -> None:
    """Put the hook in place; again and again is fine. Acts at once on what Vidur has already imported."""
    if is_installed():
        return
    sys.meta_path.insert(0, _Finder())
    if is_executed(_CONFIG_MODULE):
        _after_import(_CONFIG_MODULE)


def is_installed() -> bool:
    """Whether the hook is in place in this process."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def is_executed(module_name: str) -> bool:
    """Whether the module has been imported to its end (not merely begun)."""
    module = sys.modules.get(module_name)
    return module is not None and not getattr(module.__spec__, "_initializing", False)


def _after_import(module_name: str) -> None:
    plugins = _selected_plugins()
    if module_name == _GYMNASIUM_REGISTRY:
        if any(name == OWN_PLUGIN[0] for name, _ in plugins):
            _register_environments()
        return
    for name, load in plugins:
        if name in failures:
            continue
        try:
            load()()
        except Exception as error:
            failures[name] = error
            sys.stderr.write(f"warning: Vidur plugin {name!r} failed to load and is skipped: {error!r}\n")
    if module_name == _CONFIG_MODULE:
        _check_command_lines(is_loaded=any(name == OWN_PLUGIN[0] for name, _ in plugins))


def _register_environments() -> None:
    import importlib

    try:
        importlib.import_module(_OWN_ENVIRONMENTS)
    except Exception as error:
        sys.stderr.write(f"warning: {_OWN_ENVIRONMENTS} failed to load, its environments are missing: {error!r}\n")


def _selected_plugins() -> "list[tuple[str, Callable[[], Callable[[], None]]]]":
    """(entry-point name, function that loads it) of every plugin that VIDUR_PLUGINS admits."""
    import importlib
    import os
    from importlib.metadata import entry_points

    def load_own() -> "Any":
        return getattr(importlib.import_module(OWN_PLUGIN[1]), OWN_PLUGIN[2])

    # Our own plugin needs no installed metadata: a checkout on PYTHONPATH has none.
    plugins: dict[str, Callable[[], Any]] = {OWN_PLUGIN[0]: load_own}
    for entry_point in entry_points(group=GROUP):
        plugins.setdefault(entry_point.name, entry_point.load)
    switch = os.environ.get(SWITCH)
    if switch is None:
        return list(plugins.items())
    wanted = {name.strip() for name in switch.split(",")} - {"", "none"}
    for unknown in sorted(wanted - set(plugins)):
        sys.stderr.write(
            f"warning: {SWITCH} names the plugin {unknown!r}, which is not installed "
            f"(installed: {', '.join(sorted(plugins))})\n"
        )
    return [(name, load) for name, load in plugins.items() if name in wanted]


def _check_command_lines(is_loaded: bool) -> None:
    """Make Vidur's command line refuse what it would silently replace by a default: unknown types.

    Where our plugin is off, Vidur stays as it is, but a run that asks for one of our types stops.
    """
    from vidur.config import flat_dataclass

    stock = flat_dataclass.create_from_cli_args
    if hasattr(stock.__func__, "checks_types"):
        return

    def create_from_cli_args(cls: "Any") -> "Any":
        is_missing = not is_loaded or OWN_PLUGIN[0] in failures
        if is_missing:  # before parsing, which would complain of our other flags instead
            _refuse_own_types(_type_arguments(sys.argv[1:]))
        flat_config = stock.__get__(None, cls)()
        if is_missing:  # after it, because argparse accepts abbreviated flags
            _refuse_own_types([(f"--{n}", v) for n, v in vars(flat_config).items() if n.endswith("_type")])
        if is_loaded:
            _refuse_problems(flat_config)
        return flat_config

    create_from_cli_args.checks_types = True  # type: ignore[attr-defined]
    flat_dataclass.create_from_cli_args = classmethod(create_from_cli_args)


def own_types() -> "set[str]":
    """Our type names: with loading turned off, asking for one of them must not silently run round_robin.

    The table of heuristics is read as text: what is broken, or not installed yet (`setup.py`), cannot be imported.
    """
    import re
    from pathlib import Path

    table = Path(__file__).parent / "routing" / "heuristics.py"
    heuristics = re.findall(r'name="(\w+)",\s+type_id=', table.read_text(encoding="utf-8"))
    return {*_OTHER_TYPES, *heuristics}


def _refuse_own_types(type_arguments: list[tuple[str, str]]) -> None:
    """Stop if the command line asks for one of our types although our plugin is off or broken."""
    import os

    names = own_types()
    for flag, value in type_arguments:
        if value.lower() in names:
            error = failures.get(OWN_PLUGIN[0])
            reason = (
                f"it failed to load: {error!r}"
                if error is not None
                else f"{SWITCH}={os.environ.get(SWITCH)!r} keeps it from loading"
            )
            stop(f"error: {flag} {value} needs the plugin {OWN_PLUGIN[0]!r}, but {reason}")


def _type_arguments(arguments: list[str]) -> list[tuple[str, str]]:
    """The (flag, value) pairs of all `--…_type value` and `--…_type=value` arguments."""
    pairs = []
    for position, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if not (flag.startswith("--") and flag.endswith("_type")):
            continue
        if not equals and position + 1 < len(arguments):
            value = arguments[position + 1]
        pairs.append((flag, value))
    return pairs


def _refuse_problems(flat_config: "Any") -> None:
    """Stop if a parsed command line names unknown types, or if a plugin objects to its values."""
    problems = unknown_types(flat_config)
    if not problems:
        problems = [problem for check in command_line_checks for problem in check(flat_config)]
    if problems:
        notes = [f"note: the plugin {name!r} failed to load: {e!r}" for name, e in failures.items()]
        stop("\n".join([*(f"error: {problem}" for problem in problems), *notes]))


def unknown_types(flat_config: "Any") -> list[str]:
    """One sentence for each `…_type` flag of a parsed command line that names no known type."""
    from vidur.config.base_poly_config import BasePolyConfig
    from vidur.config.utils import get_all_subclasses, is_subclass

    problems = []
    for arguments in flat_config.dataclass_args.values():
        for _, field_name, field_type in arguments:
            if not is_subclass(field_type, BasePolyConfig):
                continue
            value = getattr(flat_config, f"{field_name}_type")
            valid = sorted({str(subclass.get_type()) for subclass in get_all_subclasses(field_type)})
            if value.lower() not in valid:
                problems.append(
                    f"--{field_name}_type: unknown type {value!r}{suggestion(value.lower(), valid)}; "
                    f"valid types: {', '.join(valid)}"
                )
    return problems


def stop(message: str) -> None:
    """End the process as a command-line error does: a message on standard error, exit status 2."""
    sys.stderr.write(f"{message}\n")
    sys.exit(2)


def suggestion(name: str, valid: "Iterable[str]") -> str:
    """` (did you mean …?)` with the nearest valid name, or an empty string."""
    import difflib

    nearest = difflib.get_close_matches(name, list(valid), n=1)
    return f" (did you mean {nearest[0]!r}?)" if nearest else ""

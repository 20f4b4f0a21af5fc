"""The scenarios that a command line names: built-in ones by name, the user's by file (`mine.yaml`)."""

from collections.abc import Sequence

from vidur_ppo_plugin import _autoload
from vidur_ppo_plugin.scenario import (
    Scenario,
    ScenarioError,
    find_scenario,
    is_scenario_file,
    load_scenario,
    scenario_names,
)

from .results import file_name


def read_scenario(text: str) -> Scenario:
    """A scenario by name or file, the flags of a user's file checked against those that Vidur has."""
    scenario = find_scenario(text)
    if is_scenario_file(text):
        _check_flags(text, scenario)
    return scenario


def read_scenarios(texts: Sequence[str]) -> list[Scenario]:
    """The scenarios of a comparison; the results have a file under the name of its stem, so names must differ."""
    given: dict[str, str] = {}
    scenarios = []
    for text in texts:
        scenario = read_scenario(text)
        if scenario.name in scenario_names() and scenario != load_scenario(scenario.name):
            raise ScenarioError(
                f"--scenarios {text}: has the name of the built-in scenario {scenario.name!r}, but other content; "
                f"rename the file"
            )
        name = file_name(scenario.name)
        if name in given:
            raise ScenarioError(f"--scenarios names one twice: {given[name]} and {text} are both {name!r} in results")
        given[name] = text
        scenarios.append(scenario)
    return scenarios


def require_capacity(scenario: Scenario, text: str) -> None:
    """ScenarioError if the arrival rate is not known."""
    if scenario.capacity is None:
        raise ScenarioError(
            f"{text}: capacity must be given, which load is relative to; `vidur-ppo capacity {text}` prints the line"
        )


def _check_flags(text: str, scenario: Scenario) -> None:
    from vidur_ppo_plugin.sim.flags import FlagError, known_flags, to_arguments

    _autoload.install()
    try:
        to_arguments(scenario.flags, known_flags())
    except FlagError as error:
        raise ScenarioError(f"{text}: flags: {error}") from error

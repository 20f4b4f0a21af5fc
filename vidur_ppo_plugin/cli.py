"""`vidur-ppo …`: each command a dataclass for its options and a few lines that call the rest of the package."""

import shlex
import sys
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from simple_parsing import field, subparsers

from vidur_ppo_plugin import __version__, _autoload
from vidur_ppo_plugin.command_parser import CommandParser
from vidur_ppo_plugin.serve.command import Serve
from vidur_ppo_plugin.serve.evaluate_log import EvaluateLog
from vidur_ppo_plugin.serve.standin.command import StandInCommand

EMBEDDED_DEFAULT = "quickstart.yaml"
#: Whom the embedded default is compared with.
COMPARED_BY_DEFAULT = "round_robin,least_tokens"


@dataclass
class Run:
    """Run one simulation of Vidur with the flags of a YAML file, and say what came of it.

        vidur-ppo run CONFIG.yaml --any_vidur_flag value

    Every key of the file is a flag of `python -m vidur.main` (docs/flags.md has ours). Flags of the command line win
    over the file.
    """

    # The YAML file; without one, a built-in example runs: the policy that comes with the package on 4 replicas and
    # 3,000 requests.
    config: str | None = field(default=None, positional=True, nargs="?", metavar="CONFIG.yaml")
    # Show the equivalent `python -m vidur.main ...` command and do not run it.
    print: bool = field(default=False, action="store_true")
    # Other schedulers to run on the same requests, comma-separated, named as for `vidur-ppo compare`. Unless given,
    # round_robin,least_tokens for the built-in example, and none for a file.
    compare: str | None = field(default=None, metavar="A,B")

    def execute(self, overrides: list[str]) -> int:
        """Expand, show or run, and print the result."""
        from vidur_ppo_plugin.sim.flags import FlagError, check_names, known_flags, to_arguments

        _autoload.install()
        known = known_flags()
        try:
            command = to_arguments(load_flags(self.config), known)
        except FlagError as error:
            return fail(f"{self.config or EMBEDDED_DEFAULT}: {error}")
        try:
            check_names(overrides, known)
        except FlagError as error:
            return fail(str(error))
        command += overrides
        if self.print:
            print(shlex.join(["python", "-m", "vidur.main", *command]))
            return 0
        return self._run(command)

    def _run(self, command: list[str]) -> int:
        from vidur_ppo_plugin.compare.same_requests import format_comparison, health_of, run_on_same_requests
        from vidur_ppo_plugin.compare.schedulers import SchedulerError, parse_schedulers
        from vidur_ppo_plugin.record.health import format_findings
        from vidur_ppo_plugin.record.outcome import format_summary
        from vidur_ppo_plugin.sim.launch import run

        text = (COMPARED_BY_DEFAULT if self.config is None else "") if self.compare is None else self.compare
        try:
            schedulers = parse_schedulers([name.strip() for name in text.split(",") if name.strip()])
        except SchedulerError as error:
            return fail(f"--compare: {error}")
        outcome = run(command)
        print(f"\n{format_summary(outcome)}")
        if self.compare is None:  # nobody asked for a comparison of a scheduler with itself
            schedulers = [scheduler for scheduler in schedulers if scheduler.kind != outcome.scheduler]
        if schedulers:
            print(f"\n{format_comparison(outcome, run_on_same_requests(outcome, command, schedulers))}")
        if findings := health_of(outcome, command):
            print(f"\nIs what it learned worth it? (docs/health.md)\n{format_findings(findings)}")
        return 0


@dataclass
class Doctor:
    """Check the installation: versions, whether Vidur loads the plugin, what is missing.

    The exit status is 0 if `vidur-ppo run` can work, 1 if it cannot.
    """

    def execute(self, overrides: list[str]) -> int:
        """Check and report."""
        from vidur_ppo_plugin.doctor import report

        return report()


@dataclass
class Dashboard:
    """Describe a Weights & Biases view of the training metrics, or save it there (--save)."""

    # The W&B project that the runs are in.
    project: str
    # The W&B user or team; with --save, your default one unless given.
    entity: str = ""
    # Number of replicas in the runs: the view has a curve of each one's share.
    replicas: int = 4
    # Save the view in W&B and print its address; needs a login and wandb-workspaces.
    save: bool = field(default=False, action="store_true")

    def execute(self, overrides: list[str]) -> int:
        """Describe or save."""
        from vidur_ppo_plugin.record import dashboard

        if self.replicas < 1:
            return fail(f"--replicas must be >= 1, got {self.replicas}")
        if not self.save:
            print(dashboard.describe(self.entity, self.project, self.replicas))
            return 0
        try:
            print(dashboard.save(self.entity or dashboard.default_entity(), self.project, self.replicas))
        except Exception as error:  # no login, no network, no permission: W&B raises types of many packages
            return fail(f"the view was not saved: {error}")
        return 0


@dataclass
class Health:
    """Say whether a run is learning, from the metrics that it has recorded, and what to turn if it is not.

        vidur-ppo health runs/one/ppo_metrics.csv

    The exit status is 0, or 1 if something is bad. docs/health.md explains every check.
    """

    # The ppo_metrics.csv of a run.
    metrics: str = field(positional=True, metavar="METRICS.csv")

    def execute(self, overrides: list[str]) -> int:
        """Examine and report."""
        from vidur_ppo_plugin.record import health

        try:
            findings = health.examine(health.read(Path(self.metrics)))
        except health.HealthError as error:
            return fail(str(error))
        print(health.format_findings(findings))
        return 1 if health.is_bad(findings) else 0


@dataclass
class Export:
    """Write the policy of a checkpoint as a numpy file, which decides without torch (for `vidur-ppo serve`)."""

    # A checkpoint file, a directory of them (its newest is taken), DIRECTORY/best, or pretrained: the policy that
    # comes with the package.
    checkpoint: str = field(positional=True, metavar="CHECKPOINT")
    # The file to write; one that is there is replaced.
    out: str = field(positional=True, metavar="OUT.npz")

    def execute(self, overrides: list[str]) -> int:
        """Load, check and write."""
        from vidur_ppo_plugin.checkpoint import CheckpointError
        from vidur_ppo_plugin.learn.export import ExportError, export_policy  # imports torch

        try:
            metadata = export_policy(self.checkpoint, Path(self.out))
        except (CheckpointError, ExportError) as error:
            return fail(str(error))
        print(
            f"{self.out}: the policy after {metadata['num_updates']} updates, {metadata['num_decisions']} decisions "
            f"(prior {metadata['prior']}, features {metadata['feature_hash']})"
        )
        return 0


@dataclass
class Compare:
    """Compare schedulers on the same requests, over several seeds: tables, plots and a report.

        vidur-ppo compare --schedulers lor,ppo_modular:pretrained --scenarios chat --out results

    The same command again continues where it stopped. docs/compare.md explains every output.
    """

    # The directory for the results; one that the same command has begun is continued.
    out: str = field(metavar="DIR")
    # What to compare, comma-separated: names of schedulers (docs/compare.md lists them), ppo_modular:CHECKPOINT for
    # a trained policy, ppo_modular:pretrained for the one that comes with the package. LABEL=NAME shows one as LABEL.
    schedulers: str = field(
        metavar="A,B",
        default="round_robin,lor,least_outstanding,least_tokens,shortest_delay,size_split",
    )
    # Where, comma-separated: names that `vidur-ppo scenario` lists, or files of your own (docs/scenarios.md), such as
    # mine.yaml. Unless given, all that come with the package but replay.
    scenarios: str = field(default="", metavar="X,Y.yaml")
    # The scheduler that the others are compared with. Unless given, round_robin if it is compared, else the first of
    # --schedulers.
    reference: str = field(default="", metavar="NAME")
    # The trace of the scenario replay: a CSV file with arrival times, prompt and output tokens.
    trace: str | None = field(default=None, metavar="FILE", nargs=None)
    # Number of seeds; each has its own requests.
    seeds: int = 8
    # Number of processes; 0 for one on each core.
    jobs: int = 0
    # The simulator: Vidur's compiled twin, or Vidur itself, which is slower; the results are the same.
    engine: str = field(default="twin", choices=["twin", "vidur"])
    # One seed and short runs, for a first look.
    quick: bool = field(default=False, action="store_true")

    def execute(self, overrides: list[str]) -> int:
        """Run, then show; 1 if a cell failed."""
        from vidur_ppo_plugin.compare.command import compare_command

        for name, low in (("seeds", 1), ("jobs", 0)):
            if getattr(self, name) < low:
                return fail(f"--{name} must be >= {low}, got {getattr(self, name)}")
        try:
            return compare_command(**vars(self))
        except ValueError as error:
            return fail(str(error))


@dataclass
class Capacity:
    """Find the highest arrival rate that the cluster of a scenario can serve for long.

        vidur-ppo capacity mine.yaml

    It prints the line `capacity: ...` for the scenario's file, which load is relative to.
    """

    # Names that `vidur-ppo scenario` lists, or files of your own, comma-separated. Unless given, all that come with
    # the package but replay.
    scenarios: str = field(default="", positional=True, nargs="?", metavar="X,Y.yaml")
    # Number of processes; 0 for one on each core.
    jobs: int = 0

    def execute(self, overrides: list[str]) -> int:
        """Bisect and print what belongs into the scenario files."""
        from vidur_ppo_plugin.compare.command import capacity_command

        try:
            return capacity_command(self.scenarios, self.jobs)
        except ValueError as error:
            return fail(str(error))


@dataclass
class Train:
    """Train a policy on many simulated clusters at once.

        vidur-ppo train configs/train/mixed_long.yaml --out runs/mixed_long

    Ctrl-C saves and ends; --resume goes on. docs/training.md explains the file and the outputs.
    """

    # The YAML file that says what to train on, and how.
    config: str = field(positional=True, metavar="CONFIG.yaml")
    # The directory for metrics and checkpoints.
    out: str = field(default="training", metavar="DIR")
    # Number of worker processes; 0 for one on each core.
    workers: int = 0
    # Where workers run: in processes of this machine, or on a Ray cluster.
    engine: str = field(default="local", choices=["local", "ray"])
    # Address of the Ray cluster (--engine ray); unless given, one is started on this machine.
    address: str = ""
    # Go on where the run in --out stopped.
    resume: bool = field(default=False, action="store_true")
    # Simulate nothing: fine-tune the checkpoint that start_from in the file names, on this record of
    # `vidur-ppo serve --record`.
    finetune: str = field(default="", metavar="RECORD")
    # Number of decisions to learn from, instead of `decisions` in the file.
    decisions: int | None = field(default=None, metavar="N", nargs=None)
    # Seed of everything that is drawn, instead of `seed` in the file.
    seed: int | None = field(default=None, metavar="N", nargs=None)

    def execute(self, overrides: list[str]) -> int:
        """Check, train, report."""
        from vidur_ppo_plugin.train.command import train_command  # imports torch

        given = {"decisions": self.decisions, "seed": self.seed}
        if self.finetune:
            return self._finetune({name: value for name, value in given.items() if value is not None})
        try:
            return train_command(
                Path(self.config),
                out=Path(self.out),
                workers=self.workers,
                engine=self.engine,
                address=self.address,
                resume=self.resume,
                overrides={name: value for name, value in given.items() if value is not None},
            )
        except ValueError as error:
            return fail(str(error))

    def _finetune(self, overrides: dict[str, int]) -> int:
        from vidur_ppo_plugin.train.finetune import finetune_command

        if self.resume or self.engine != "local":
            return fail("--finetune goes with neither --resume nor --engine ray")
        try:
            return finetune_command(Path(self.config), Path(self.finetune), out=Path(self.out), overrides=overrides)
        except ValueError as error:
            return fail(str(error))


@dataclass
class Scenario:
    """List the scenarios, or print the plain command of Vidur that simulates one."""

    # The scenario, or a file of your own such as mine.yaml; without one, all that come with the package are listed.
    name: str | None = field(default=None, positional=True, nargs="?", metavar="NAME")
    # The scheduler of the printed command, named as for `vidur-ppo compare`.
    scheduler: str = "least_tokens"
    # The seed of the requests; comparisons use 1000 and up.
    seed: int = 1000

    def execute(self, overrides: list[str]) -> int:
        """List or print."""
        from vidur_ppo_plugin.compare.command import scenario_command

        try:
            return scenario_command(self.name, self.scheduler, self.seed)
        except ValueError as error:
            return fail(str(error))


@dataclass
class PretrainedList:
    """Print which policies come with the package: size, hash, how they were trained, what was measured."""

    def execute(self, overrides: list[str]) -> int:
        """Verify and print."""
        from vidur_ppo_plugin.shipping import list_command

        try:
            return list_command()
        except ValueError as error:
            return fail(str(error))


@dataclass
class PretrainedMake:
    """Train a policy and write the files that ship it: a checkpoint, a numpy file and metadata."""

    # The YAML file that says what to train on, and how, as for `vidur-ppo train`.
    config: str = field(positional=True, metavar="CONFIG.yaml")
    # The directory of the training run; one that was interrupted goes on, one that is finished is used as it is.
    run: str = field(default="training/pretrained", metavar="DIR")
    # The directory to write NAME.ckpt, NAME.npz and NAME.json into; give this or --into-package.
    out: str = field(default="", metavar="DIR")
    # Write them into the package itself, where `pretrained` is found.
    into_package: bool = field(default=False, action="store_true", alias="--into-package")
    # The policy's name.
    name: str = field(default="pretrained", metavar="NAME")
    # Which checkpoint of the run to take: that of the best evaluation, or the last.
    checkpoint: str = field(default="best", choices=["best", "last"])
    # A results directory of `vidur-ppo compare` with this very policy, whose figures go into the metadata.
    measured: str = field(default="", metavar="DIR")
    # Number of worker processes of the training; 0 for one on each core.
    workers: int = 0
    # Seed of everything that is drawn, instead of `seed` in the file.
    seed: int | None = field(default=None, metavar="N", nargs=None)

    def execute(self, overrides: list[str]) -> int:
        """Train, write, report."""
        from vidur_ppo_plugin import pretrained
        from vidur_ppo_plugin.shipping import MakeOptions, make_command

        if bool(self.out) == self.into_package:
            return fail("give either --out DIR or --into-package")
        try:
            return make_command(
                MakeOptions(
                    config=Path(self.config),
                    run=Path(self.run),
                    directory=pretrained.DIRECTORY if self.into_package else Path(self.out),
                    name=self.name,
                    which=self.checkpoint,
                    workers=self.workers,
                    seed=self.seed,
                    measured=Path(self.measured) if self.measured else None,
                )
            )
        except ValueError as error:
            return fail(str(error))


@dataclass
class Pretrained:
    """List the policies that come with the package, or make one."""

    command: Any = subparsers({"list": PretrainedList, "make": PretrainedMake})

    def execute(self, overrides: list[str]) -> int:
        """Pass on."""
        return int(self.command.execute(overrides))


@dataclass
class Commands:
    """Route LLM requests with a policy trained by PPO: simulate it in Vidur, compare it, train it, serve with it.

    Start with `vidur-ppo doctor`, then `vidur-ppo run`. `vidur-ppo COMMAND --help` explains a command.
    """

    command: Any = subparsers(
        {
            "run": Run,
            "compare": Compare,
            "capacity": Capacity,
            "scenario": Scenario,
            "train": Train,
            "serve": Serve,
            "standin": StandInCommand,
            "evaluate-log": EvaluateLog,
            "pretrained": Pretrained,
            "doctor": Doctor,
            "health": Health,
            "dashboard": Dashboard,
            "export": Export,
        }
    )


def load_flags(path: str | None) -> dict[Any, Any]:
    """The flags of a YAML file, or of the embedded default."""
    from vidur_ppo_plugin.sim.flags import FlagError

    if path is None:
        text = resources.files("vidur_ppo_plugin").joinpath(EMBEDDED_DEFAULT).read_text(encoding="utf-8")
    else:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise FlagError(f"cannot be read: {error}") from error
    try:
        flags = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise FlagError(f"is not YAML: {error}") from error
    if not isinstance(flags, dict):
        raise FlagError(f"must be a mapping of flags to values, got {type(flags).__name__}")
    return flags


def split_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Our own arguments, and the Vidur flags with their values that `run` passes on."""
    if not arguments or arguments[0] != "run":
        return arguments, []
    switches = ("--print", "-h", "--help")
    own, passed_on = ["run"], []
    rest = iter(arguments[1:])
    for argument in rest:
        if argument in switches or argument.startswith("--compare="):
            own.append(argument)
        elif argument == "--compare":
            own += [argument, *([value] if (value := next(rest, None)) is not None else [])]
        else:
            passed_on.append(argument)
    if passed_on and not passed_on[0].startswith("-"):
        own.append(passed_on.pop(0))
    return own, passed_on


def fail(message: str) -> int:
    """Report a usage error."""
    print(f"error: {message}", file=sys.stderr)
    return 2


def main(arguments: list[str] | None = None) -> int:
    """The `vidur-ppo` command; returns its exit status."""
    own, overrides = split_arguments(list(sys.argv[1:] if arguments is None else arguments))
    parser = CommandParser(prog="vidur-ppo", description=Commands.__doc__)
    parser.add_argument("--version", action="version", version=f"vidur-ppo-plugin {__version__}")
    parser.add_arguments(Commands, dest="options")
    return int(parser.parse_args(own).options.command.execute(overrides))


if __name__ == "__main__":
    sys.exit(main())

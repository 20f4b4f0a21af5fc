"""A saved W&B view of our metrics: one section a group, line plots over `ppo/update`."""

import importlib
from typing import Any

from vidur_ppo_plugin.flags import HYBRID_COMPONENTS
from vidur_ppo_plugin.record.metrics import GROUPS, STEP, Group, metrics, wandb_name

VIEW_NAME = "vidur-ppo"

# Curves that are read together share a panel; every other metric has a panel of its own.
TOGETHER: dict[str, tuple[str, ...]] = {
    "Raw rewards": ("reward_min", "reward_mean", "reward_max"),
    "Reward components": tuple(component.name for component in HYBRID_COMPONENTS),
    "Credit of the chosen replica": (
        *(f"credit_{component.name}" for component in HYBRID_COMPONENTS),
        "credit_total_reward",
    ),
    "End-to-end latency (s)": ("latency_mean", "latency_p50", "latency_p90", "latency_p99"),
    "Time to first token (s)": ("ttft_p50", "ttft_p90", "ttft_p99"),
    "Where the time goes": ("time_simulating_share", "time_deciding_share", "time_learning_share"),
    "Shares of the replicas": ("action_share_min", "action_share_max"),
}


def panels_of(group: Group, num_replicas: int) -> dict[str, list[str]]:
    """The panels of a section: title to W&B names. Every metric of the group but the step is in exactly one."""
    names = [metric.name for metric in metrics(num_replicas) if metric.group == group and metric.name != STEP]
    titles = {name: title for title, together in TOGETHER.items() for name in together}
    panels: dict[str, list[str]] = {}
    for name in names:
        title = "Shares of the replicas" if name.startswith("action_replica_") else titles.get(name, name)
        panels.setdefault(title, []).append(wandb_name(name))
    return panels


def describe(entity: str, project: str, num_replicas: int) -> str:
    """What the view would contain, for people. Needs neither the network nor wandb-workspaces."""
    place = f"{entity}/{project}" if entity else project
    lines = [f"The view {VIEW_NAME!r} of {place}, {num_replicas} replicas, over {wandb_name(STEP)}:"]
    for group in GROUPS:
        lines += ["", group.title]
        lines += [f"  {title}: {', '.join(names)}" for title, names in panels_of(group, num_replicas).items()]
    return "\n".join([*lines, "", "Nothing was saved; --save saves it in W&B."])


def default_entity() -> str:
    """The W&B user or team of this machine's login; ValueError if there is none."""
    import wandb

    entity = wandb.Api().default_entity
    if not entity:
        raise ValueError("W&B knows no default entity here: give --entity")
    return str(entity)


def build_workspace(entity: str, project: str, num_replicas: int) -> Any:
    """The view as a `wandb_workspaces` object. Needs no network."""
    workspaces, reports = _import()
    sections = []
    for group in GROUPS:
        panels = [
            reports.LinePlot(title=title, x=wandb_name(STEP), y=names)
            for title, names in panels_of(group, num_replicas).items()
        ]
        sections.append(workspaces.Section(name=group.title, panels=panels, is_open=True))
    settings = workspaces.WorkspaceSettings(x_axis=wandb_name(STEP))
    return workspaces.Workspace(entity=entity, project=project, name=VIEW_NAME, sections=sections, settings=settings)


def save(entity: str, project: str, num_replicas: int) -> str:
    """Save the view in W&B (needs the network and a login); returns its address."""
    return str(build_workspace(entity, project, num_replicas).save().url)


def _import() -> tuple[Any, Any]:
    try:
        return (
            importlib.import_module("wandb_workspaces.workspaces"),
            importlib.import_module("wandb_workspaces.reports.v2"),
        )
    except ImportError as error:
        raise ImportError(
            f"`vidur-ppo dashboard` needs wandb-workspaces: pip install wandb-workspaces ({error})"
        ) from error

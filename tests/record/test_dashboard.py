"""The saved W&B view, built and read without a network."""

import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from vidur_ppo_plugin.record import dashboard
from vidur_ppo_plugin.record.metrics import GROUPS, header, wandb_name


@pytest.mark.parametrize("num_replicas", [1, 4, 64, 65, 1024])
def test_every_metric_is_in_exactly_one_panel(num_replicas: int) -> None:
    shown = [name for group in GROUPS for names in dashboard.panels_of(group, num_replicas).values() for name in names]
    assert sorted(shown) == sorted(wandb_name(name) for name in header(num_replicas) if name != "update")


def workspace(num_replicas: int) -> Any:
    pytest.importorskip("wandb_workspaces")
    return dashboard.build_workspace("someone", "routing", num_replicas)


def test_sections_and_panels_are_ours() -> None:
    view = workspace(4)
    assert (view.entity, view.project, view.name) == ("someone", "routing", "vidur-ppo")
    assert [section.name for section in view.sections] == [group.title for group in GROUPS]
    panels = {panel.title: panel for section in view.sections for panel in section.panels}
    assert panels["Shares of the replicas"].y == [f"ppo_actions/action_replica_{index}" for index in range(4)]
    assert panels["End-to-end latency (s)"].y[0] == "ppo_latency/latency_mean"
    assert panels["entropy"].y == ["ppo/entropy"]
    assert {panel.x for panel in panels.values()} == {"ppo/update"}


def test_the_view_that_would_be_sent_names_our_metrics() -> None:
    """`_to_model` is what `save` serialises: the metric names must survive its translation."""
    spec = workspace(2)._to_model().model_dump_json(by_alias=True)
    for name in header(2):
        assert f'"{wandb_name(name)}"' in spec, name


class Server(http.server.ThreadingHTTPServer):
    """Stands in for W&B on this machine: answers what `wandb` asks and keeps the views that it is sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.views: list[dict[str, Any]] = []


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        content = json.loads(body) if self.path == "/graphql" else {"query": ""}
        data: dict[str, Any] = {"viewer": {"id": "1", "entity": "someone", "username": "someone", "flags": "{}"}}
        if "upsertView" in content["query"]:
            assert isinstance(self.server, Server)
            self.server.views.append(content["variables"])
            data = {"upsertView": {"view": {"id": "1", "name": "nw-abc-v"}, "inserted": True}}
        answer = json.dumps({"data": data}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


def test_saving_sends_the_view_and_returns_its_address(tmp_path: Path) -> None:
    pytest.importorskip("wandb_workspaces")
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        environment = {
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "HOME": str(tmp_path),  # no settings and no login of whoever runs the tests
            "WANDB_BASE_URL": address,
            "WANDB_API_KEY": "0" * 40,
            "WANDB_ERROR_REPORTING": "false",
        }
        code = "from vidur_ppo_plugin.record.dashboard import save\nprint(save('someone', 'routing', 2))"
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        server.shutdown()
    assert done.stdout.strip() == f"{address}/someone/routing?nw=abc", done.stderr
    (view,) = server.views
    assert (view["entityName"], view["projectName"], view["displayName"]) == ("someone", "routing", "vidur-ppo")
    assert all(f'"{wandb_name(name)}"' in view["spec"] for name in header(2))


def test_without_wandb_workspaces_the_error_says_what_to_do() -> None:
    code = (
        "import importlib.abc, sys\n"
        "class Hide(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name.split('.')[0] == 'wandb_workspaces': raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Hide())\n"
        "from vidur_ppo_plugin.record.dashboard import build_workspace\n"
        "try: build_workspace('a', 'b', 2)\n"
        "except ImportError as error: print(error)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    output = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert "needs wandb-workspaces: pip install" in output

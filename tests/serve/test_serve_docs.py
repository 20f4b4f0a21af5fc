"""The commands of docs/serving.md, run as they stand there, on ports that are free."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

from serving import free_port

DOCUMENT = Path(__file__).parents[2] / "docs" / "serving.md"


def block(name: str) -> str:
    text = DOCUMENT.read_text(encoding="utf-8")
    match = re.search(rf"<!-- test: {name} -->\n```bash\n(.*?)```", text, re.DOTALL)
    assert match is not None, name
    return match[1]


def test_a_new_user_gets_traffic_flowing(tmp_path: Path) -> None:
    command = tmp_path / "vidur-ppo"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m vidur_ppo_plugin.cli "$@"\n')
    command.chmod(0o755)
    script = "set -e\n" + "\n".join(block(name) for name in ("serving", "traffic", "admin"))
    for port in ("8000", "8001", "8002", "8009", "8100"):
        script = re.sub(rf"\b{port}\b", str(free_port()), script)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    process = subprocess.Popen(
        ["bash", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
        cwd=tmp_path,
        start_new_session=True,
    )
    lines: list[str] = []
    limit = threading.Timer(120, os.killpg, (process.pid, signal.SIGKILL))
    limit.start()
    try:
        # The servers outlive the script and keep its output open: read until the last answer.
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if line.startswith('{"backends": '):
                break
    finally:
        limit.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        _, errors = process.communicate()
    text = "".join(lines)
    assert '"status": "ok"' in text, errors
    assert '"completion_tokens": 8' in text
    assert "data: [DONE]" in text
    counts = [float(number) for number in re.findall(r"vidur_ppo_placements_total\{.*\} (\d+)", text)]
    assert sum(counts) == 62
    assert '"is_draining": true' in text
    assert lines[-1].count('"url"') == 1  # one was added, one was removed

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_placement_meshes_futures_and_deaths_on_several_nodes() -> None:
    script = Path(__file__).with_name("several_nodes.py")
    path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH", "")]))
    environment = os.environ | {"PYTHONPATH": path, "RAY_memory_monitor_refresh_ms": "0", "RAY_AUTH_MODE": "disabled"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all well" in done.stdout

"""A Spark worker imports what its task needs: each import costs every worker its time and memory."""

from __future__ import annotations

import subprocess
import sys

NOT_FOR_WORKERS = ("pydantic", "pydantic_settings", "stormproof.core.postgres.embedded")


def loaded_by(module: str) -> set[str]:
    """Those of the modules above that a new process has once it imported this one."""
    code = f"import sys, {module}; print(*(name for name in {NOT_FOR_WORKERS} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


def test_the_engine_on_a_worker_loads_neither_settings_nor_the_embedded_server() -> None:
    assert loaded_by("stormproof.core.engine.frame") == set()  # imports `engine.spark`, too


def test_control_the_settings_load_them() -> None:
    assert "pydantic" in loaded_by("stormproof.core.start.settings")

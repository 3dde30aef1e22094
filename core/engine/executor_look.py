"""What a task says of the executor that it runs on: asked before anything of ours is imported there.

`looked` travels to the executors by value and needs the standard library alone, so that a machine without the package, or
with another version of it, can still say so. Only then it imports the package there, for the probes.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import pickle
import platform
import socket
import sys
import time
from typing import Any, Final

PACKAGES: Final = {
    "pyspark": "pyspark",
    "pyarrow": "pyarrow",
    "pandas": "pandas",
    "numpy": "numpy",
    "psycopg": "psycopg",
    "adbc-driver-postgresql": "adbc_driver_postgresql",
    "pgpq": "pgpq",
    "deltalake": "deltalake",
}
"""What a task may need beside this package: each distribution, and the module that it is imported by."""


def looked(probes: bytes, hold_s: float) -> str:
    """This executor's facts, as JSON: host, Python, clock, packages, and the faults that the probes find.

    It is given `probes`, pickled, and keeps its slot for `hold_s` seconds, so that the other slots get tasks, too.
    """
    began_s = time.monotonic()
    found: dict[str, Any] = {
        "host": socket.gethostname(),
        "executor": os.getppid(),  # a worker's parent is the executor's own daemon
        "python": platform.python_version(),
        "executable": sys.executable,
        "time_s": time.time(),
        "packages": {},
        "missing": {},
        "faults": [],
    }
    for name, module in PACKAGES.items():
        try:
            imported = importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 - a broken package may raise anything; it is told, not swallowed
            found["missing"][name] = f"{type(error).__name__}: {error}"
            continue
        try:
            found["packages"][name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # Spark's own copy of pyspark, in an archive
            found["packages"][name] = str(getattr(imported, "__version__", "?"))
    try:
        here: Any = importlib.import_module("stormproof.core.engine.executor_look")
        found["packages"]["stormproof"] = here.own_version()
    except Exception as error:  # noqa: BLE001 - as above
        found["missing"]["stormproof"] = f"{type(error).__name__}: {error}"
    else:
        found["faults"] = here.faults_found(probes)
    time.sleep(max(0.0, hold_s - (time.monotonic() - began_s)))
    return json.dumps(found)


def own_version() -> str:
    """The version of this package as it is installed here, and a piece of its code's digest."""
    from stormproof.core.start.preflight import package_fingerprint

    try:
        version = importlib.metadata.version("stormproof")
    except importlib.metadata.PackageNotFoundError:  # files alone, on PYTHONPATH
        version = "?"
    return f"{version} ({package_fingerprint()[:8]})"


def faults_found(probes: bytes) -> list[str]:
    """The fault that each probe meets on this machine, as text that `spark_error.fault_in` reads."""
    from stormproof.core.engine.spark_error import carried
    from stormproof.core.start.preflight import first_fault

    faults = [first_fault((probe,)) for probe in pickle.loads(probes)]  # noqa: S301 - what the driver packed
    return [carried(fault) for fault in faults if fault is not None]

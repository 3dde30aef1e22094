"""Checks the machines of a run before the first batch, and again after one of them lacked something."""

from __future__ import annotations

from pathlib import Path

from stormproof.core.engine.protocol import Engine
from stormproof.core.graph.plan import Plan
from stormproof.core.preflight import PackageProbe, UnpickleProbe, marked, package_fingerprint
from stormproof.core.source.protocol import Source
from stormproof.core.storage import is_url
from stormproof.sinks.object_probe import marked_objects


class Preflight:
    """Checks in every slot of an engine what each task of this run will need: the package and the user's functions, the
    folders that it writes, and the databases that it reads.

    `functions` are the topology's, as `stormproof.core.engine.shipping.require_shippable` packed them.
    """

    def __init__(self, engine: Engine, plan: Plan, functions: bytes, source: Source, staging: Path) -> None:
        self._engine = engine
        self._source = source
        self._functions = functions
        self._folders: list[tuple[str, str | Path]] = [("the staging folder", staging)]
        for spec in plan.sink_specs:
            folder = spec.files_in(plan.sinks[spec.name])
            if folder is not None:
                self._folders.append((f"the folder of sink {spec.name!r}", folder))

    def __call__(self) -> None:
        """Run all checks, as one small job.

        Raises:
            MachineUnfit: a machine cannot run tasks; names it, and what to do. No message was opened.
            MachineUnavailable, StoreUnavailable: something is missing that may come back.
        """
        local = [(what, folder) for what, folder in self._folders if not is_url(str(folder))]
        stored = [(what, str(folder)) for what, folder in self._folders if is_url(str(folder))]
        with marked(local) as folders, marked_objects(stored) as objects:
            package, functions = PackageProbe(package_fingerprint()), UnpickleProbe(self._functions)
            self._engine.ask((package, functions, *folders, *objects, *self._source.probes()))

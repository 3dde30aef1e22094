"""Checks the machines of a run before the first batch, and again after one of them lacked something."""

from __future__ import annotations

from contextlib import ExitStack

from stormproof.core.engine.protocol import Engine
from stormproof.core.graph.plan import Plan
from stormproof.core.object_probe import marked_places
from stormproof.core.preflight import PackageProbe, PulseProbe, UnpickleProbe, package_fingerprint
from stormproof.core.pulse.listener import PulseListener
from stormproof.core.source.protocol import Source


class Preflight:
    """Checks in every slot of an engine what each task of this run will need: the package and the user's functions, the
    folders that it writes, the databases that it reads, and the way to the driver.

    `functions` are the topology's, as `stormproof.core.engine.shipping.require_shippable` packed them. `staging` is a
    folder that they need besides those of sinks. With a `listener` tasks report to it.
    """

    def __init__(
        self,
        engine: Engine,
        plan: Plan,
        functions: bytes,
        source: Source,
        staging: str | None = None,
        listener: PulseListener | None = None,
    ) -> None:
        self._engine = engine
        self._source = source
        self._functions = functions
        self._listener = listener
        self._folders = [] if staging is None else [("the staging folder", staging)]
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
        with ExitStack() as stack:
            folders = stack.enter_context(marked_places(self._folders))
            ways = () if self._listener is None else (PulseProbe(stack.enter_context(self._listener.job()).place),)
            package, functions = PackageProbe(package_fingerprint()), UnpickleProbe(self._functions)
            self._engine.ask((package, functions, *ways, *folders, *self._source.probes()))

"""A canary that runs behind the page, in a thread of its own; its state is looked at, and it can be stopped."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final

from stormproof.core.errors import StormproofError

if TYPE_CHECKING:
    from stormproof.trident.decisions.canary import CanaryReport
    from stormproof.trident.web.decide.letters import CanaryRun

_log: Final = logging.getLogger("stormproof.web")


class RunningCanary:
    """One canary. If the page's process ends, it stops where it is: what was handed out stays so, the rest is untouched."""

    def __init__(self, run: CanaryRun) -> None:
        self._run = run
        self._stop = threading.Event()
        self._ended = threading.Event()
        self.report: CanaryReport | None = None
        """The newest state."""
        self.error: str | None = None
        """Why it failed."""
        self._thread = threading.Thread(target=self._work, name="canary", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether it goes on."""
        return not self._ended.is_set()

    def stop(self) -> None:
        """Have it hand out no further wave."""
        self._stop.set()

    def wait(self, seconds: float) -> bool:
        """Wait for its end; whether it has ended."""
        return self._ended.wait(seconds)

    def _work(self) -> None:
        try:
            self.report = self._run.run(self._told, self._stop.is_set)
        except StormproofError as error:
            self.error = error.message
        except Exception:  # noqa: BLE001 - the thread's outermost frame: the page shows it, the log says why
            self.error = "it failed unexpectedly; the page's log says why"
            _log.exception("a canary failed")
        finally:
            self._ended.set()

    def _told(self, report: CanaryReport) -> None:
        self.report = report

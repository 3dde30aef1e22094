"""Several functions at once, each in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable


def in_threads(*works: Callable[[], object]) -> list[BaseException]:
    """Run all at once, begun together; what they raised."""
    raised = list[BaseException]()
    begin = threading.Barrier(len(works))

    def work(of: Callable[[], object]) -> None:
        begin.wait(30)
        try:
            of()
        except BaseException as error:  # noqa: BLE001 - handed on
            raised.append(error)

    threads = [threading.Thread(target=work, args=(of,)) for of in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return raised

"""P11: each question of the audit over ten million messages in 100,000 batches."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Final

from benchmarks.audit_ledger import A_MESSAGE, A_TXID, MESSAGES, TOPOLOGY, TXIDS, fill
from benchmarks.figures import Goal, Unit
from benchmarks.harness import Case
from benchmarks.workbench import Workbench, timed
from stormproof.core.postgres.database import Database, connect
from stormproof.trident.audit.batches import txn
from stormproof.trident.audit.ledger import AuditLedger
from stormproof.trident.audit.message import message
from stormproof.trident.audit.questions import QuestionFilter, ask
from stormproof.trident.declarations.questions import QUESTIONS
from stormproof.trident.ledger.database import ledger_engine

MOST_S: Final = 1.0
GROUPS: Final = {"replays": ("reason", "component", "day"), "dead-letters": ("error_class",)}


def p11(bench: Workbench) -> Iterator[AbstractContextManager[Case]]:
    """One case a question; those that are asked by group, by group, too."""
    fill(bench.database)
    engine = ledger_engine(bench.database)
    ledger = AuditLedger(engine)
    try:
        for question in (one for one in QUESTIONS.values() if one.order):
            yield _case(question.name, partial(ask, ledger, question, QuestionFilter(TOPOLOGY)))
        for name, group in GROUPS.items():
            yield _case(f"{name}-grouped", partial(ask, ledger, QUESTIONS[name], QuestionFilter(TOPOLOGY, group=group)))
        yield _case("txn", partial(txn, ledger, TOPOLOGY, A_TXID))
        yield _case("message", partial(message, ledger, TOPOLOGY, A_MESSAGE))
        for view in ("txn", "message"):
            yield _case(f"{view}-view", partial(_read, bench.database, view))
    finally:
        engine.dispose()


def _read(database: Database, view: str) -> None:
    wanted = f"txid = {A_TXID}" if view == "txn" else f"message = '{A_MESSAGE}'"
    with connect(database, application_name="benchmarks", autocommit=True) as connection:
        found = connection.execute(f"select * from stormproof.audit_{view} where {wanted}".encode()).fetchall()
    if not found:
        raise RuntimeError(f"audit_{view} has no row")


@contextmanager
def _case(name: str, answer: Callable[[], object]) -> Generator[Case]:
    yield Case(
        key=f"P11-{name}",
        title=f"audit {name}: {MESSAGES:,} messages in {TXIDS:,} batches; beside the second that it may take",
        unit=Unit.SECONDS,
        goal=Goal(own=MOST_S),
        ours=lambda: timed(answer),
        theirs=MOST_S,
        pairs_most=5,
        warm_ups=1,
    )

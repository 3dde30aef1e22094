"""The state machine's table: what may follow what."""

from __future__ import annotations

import pytest

from stormproof.trident.terms.transaction_states import MOVES, TxnState


def test_every_state_has_its_moves() -> None:
    assert set(MOVES) == set(TxnState)


@pytest.mark.parametrize("state", [TxnState.COMMITTED, TxnState.ABORTED, TxnState.ABANDONED])
def test_an_end_is_an_end(state: TxnState) -> None:
    assert state.ended


def test_a_prepared_batch_is_never_given_back() -> None:
    """Prepared content may be in a sink already, so the messages must never be handed out again."""
    reachable: set[TxnState] = set()
    frontier = {TxnState.PREPARED}
    while frontier:
        reachable |= frontier
        frontier = {after for state in frontier for after in MOVES[state]} - reachable
    assert reachable == {TxnState.PREPARED, TxnState.BLOCKED, TxnState.COMMITTED}

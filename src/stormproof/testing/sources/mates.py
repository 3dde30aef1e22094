"""The cases about messages that were in one batch: they come again in one batch, so that no partner of a join lacks another.

A source whose `keeps_mates` is false is left out; behind it, a topology with a join is refused.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from stormproof.core.base.errors import Fenced
from stormproof.core.contract.source import Limit, Slice, Source
from stormproof.testing.sources.harness import (
    SourceHarness,
    SubscribedSource,
    lease_of,
    messages_of,
    numbered,
    open_slice,
    payloads_of,
)

WHOLE = Limit(1_000, whole=True)
ONE = Limit(1, bytes=1, whole=True)


def _payloads(source: Source, slice_: Slice) -> list[bytes]:
    return sorted(payloads_of(messages_of(source, slice_)))


def _keeper(harness: SourceHarness) -> SubscribedSource:
    """A source that keeps mates together, with four messages."""
    source = harness.view()
    if not source.keeps_mates:
        pytest.skip("this source does not keep mates together, and says so")
    harness.put(numbered(4))
    return source


class MateCases:
    """What was in one batch is opened again in one batch, all of it, wherever a batch asks for it by its name."""

    def test_a_returned_batch_is_whole_again(self, harness: SourceHarness) -> None:
        """With `whole`, the limit does not cut what was one batch; it has a name, which messages of others may share."""
        keeper = _keeper(harness)
        assert not open_slice(keeper, "a", WHOLE).mates, "messages that were never opened have no mates"
        keeper.abort(lease_of("a"))
        again = open_slice(keeper, "b", ONE)
        assert _payloads(keeper, again) == numbered(4)
        assert again.mates

    def test_mates_are_retried_together_and_asked_for_by_name(self, harness: SourceHarness) -> None:
        """What failed in one confirm comes in one slice. With names only that is opened, with none only what never was."""
        keeper = _keeper(harness)
        slice_ = open_slice(keeper, "a", WHOLE)
        failed = [replace(m.failed(), mates=2) for m in messages_of(keeper, slice_)[:2]]
        keeper.confirm(lease_of("a"), failed)
        harness.wait_for_retries()
        again = open_slice(keeper, "b", ONE)
        assert again.retry
        assert _payloads(keeper, again) == numbered(2)
        keeper.abort(lease_of("b"))
        harness.put(numbered(2, 4))
        assert _payloads(keeper, open_slice(keeper, "c", replace(WHOLE, mates=frozenset()))) == numbered(2, 4)
        keeper.confirm(lease_of("c"))
        other = Limit(9, whole=True, mates=frozenset({"another"}))
        assert keeper.open(lease_of("d"), other, 1) is None
        assert _payloads(keeper, open_slice(keeper, "d", replace(ONE, mates=again.mates))) == numbered(2)

    def test_mates_come_though_their_own_lease_has_not_run_out(self, harness: SourceHarness) -> None:
        """The lease of a mate in another source has run out before. What is held is not handed out."""
        keeper = _keeper(harness)
        open_slice(keeper, "a", WHOLE)
        keeper.abort(lease_of("a"))
        names = open_slice(keeper, "b", WHOLE).mates
        assert _payloads(keeper, open_slice(keeper, "c", replace(ONE, mates=names))) == numbered(4)
        with pytest.raises(Fenced):
            keeper.hold(lease_of("b"))
        keeper.hold(lease_of("c"))
        assert keeper.open(lease_of("d"), replace(ONE, mates=names), 1) is None

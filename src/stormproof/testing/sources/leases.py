"""The cases about leases: who may do what with a slice, and what becomes of it when a driver dies."""

from __future__ import annotations

import pytest

from stormproof.core.base.errors import Fenced, UsageError
from stormproof.core.contract.source import Backlog, Lease, Limit
from stormproof.testing.sources.harness import (
    ANY,
    SEED,
    SourceHarness,
    each_slice,
    lease_of,
    messages_of,
    numbered,
    open_slice,
    payloads_of,
)


class LeaseCases:
    """A slice belongs to one owner in one epoch, and drivers that die on it are counted."""

    def test_an_owner_holds_one_slice(self, harness: SourceHarness) -> None:
        """An owner key names one slice: a second open under it is refused."""
        harness.put(numbered(4))
        source = harness.view()
        open_slice(source, "a", Limit(2))
        with pytest.raises(UsageError, match="a holds a slice already"):
            source.open(lease_of("a"), Limit(2), SEED)

    def test_a_lease_that_ran_out_goes_to_another(self, harness: SourceHarness) -> None:
        """A lease that ran out is opened by another, and its first owner can neither keep nor confirm it."""
        harness.put(numbered(3))
        source = harness.view()
        open_slice(source, "a")
        assert source.open(lease_of("b"), ANY, SEED) is None
        harness.expire()
        with pytest.raises(Fenced):
            source.pin(lease_of("a"))
        with pytest.raises(Fenced):
            source.extend(lease_of("a"))
        again = open_slice(source, "b")
        assert len(messages_of(source, again)) == 3
        with pytest.raises(Fenced):
            source.confirm(lease_of("a"))
        source.abort(lease_of("a"))  # returns nothing: it is b's now
        assert source.open(lease_of("c"), ANY, SEED) is None
        source.pin(lease_of("b"))
        source.confirm(lease_of("b"))
        with pytest.raises(Fenced):
            source.confirm(lease_of("a"))
        assert source.backlog() == Backlog(0, 0, 0, 0)

    def test_a_held_lease_never_runs_out(self, harness: SourceHarness) -> None:
        """After `pin` a lease lasts until it is confirmed or aborted; it may be pinned again."""
        harness.put(numbered(3))
        source = harness.view()
        source.open(lease_of("a"), ANY, SEED)
        source.extend(lease_of("a"))
        source.pin(lease_of("a"))
        source.pin(lease_of("a"))
        harness.expire()
        assert source.open(lease_of("b"), ANY, SEED) is None
        source.extend(lease_of("a"))
        source.confirm(lease_of("a"))

    def test_a_lease_that_is_not_there_cannot_be_kept(self, harness: SourceHarness) -> None:
        """`pin` and `extend` of a returned lease are Fenced."""
        harness.put(numbered(1))
        source = harness.view()
        open_slice(source, "a")
        source.abort(lease_of("a"))
        for keep in (source.pin, source.extend):
            with pytest.raises(Fenced):
                keep(lease_of("a"))

    def test_a_new_epoch_takes_the_leases_and_the_old_one_can_do_nothing(self, harness: SourceHarness) -> None:
        """`recover` takes all leases over and counts deaths of open ones; the older epoch is Fenced everywhere."""
        harness.put(numbered(6))
        old = harness.view(epoch=1)
        old.open(lease_of("a", 1), Limit(2), SEED)
        held = open_slice(old, "b", Limit(2))
        old.pin(lease_of("b", 1))
        new = harness.view(epoch=2)
        assert set(new.recover(2)) == {"a", "b"}
        assert set(new.recover(2)) == {"a", "b"}  # its own ones too, with no further death
        for call in (
            lambda: old.open(lease_of("c", 1), ANY, SEED),
            lambda: old.pin(lease_of("a", 1)),
            lambda: old.extend(lease_of("b", 1)),
            lambda: old.confirm(lease_of("b", 1)),
            lambda: old.abort(lease_of("a", 1)),
            lambda: old.recover(1),
            lambda: old.subscribe("s", 1),
        ):
            with pytest.raises(Fenced):
                call()
        attached = new.attach(held.position, held.expected)
        assert attached == held
        assert payloads_of(messages_of(new, attached)) == [b"m2", b"m3"]
        new.confirm(lease_of("b", 2))
        with pytest.raises(Fenced):
            old.confirm(lease_of("b", 1))
        new.abort(lease_of("a", 2))
        again = open_slice(new, "d", epoch=2)
        assert payloads_of(messages_of(new, again)) == [b"m0", b"m1"]
        assert again.deaths == 1

    def test_a_slice_that_took_two_drivers_down_is_opened_in_halves(self, harness: SourceHarness) -> None:
        """A slice on which two drivers died comes in halves, a half on which one more dies in quarters."""
        harness.put(numbered(5))
        harness.view(epoch=1).open(lease_of("a", 1), ANY, SEED)
        for epoch in (2, 3):
            driver = harness.view(epoch=epoch)
            assert driver.recover(epoch) == ("a" if epoch == 2 else "b2",)
            driver.abort(Lease("a" if epoch == 2 else "b2", epoch))
            slice_ = open_slice(driver, f"b{epoch}", epoch=epoch)
            assert (slice_.expected.messages, slice_.deaths) == ((5, 1) if epoch == 2 else (3, 1))
        last = harness.view(epoch=4)
        last.recover(4)
        last.abort(Lease("b3", 4))
        halves = list[int]()
        for _, slice_ in each_slice(last, epoch=4):
            assert len(messages_of(last, slice_)) == slice_.expected.messages
            halves.append(slice_.expected.messages)
        assert sorted(halves) == [1, 2, 2]

    def test_a_single_message_keeps_its_deaths(self, harness: SourceHarness) -> None:
        """Deaths of a message that stands alone are counted on, so that it can be given up."""
        harness.put(numbered(1))
        owner = "a0"
        harness.view(epoch=1).open(lease_of(owner, 1), ANY, SEED)
        for epoch in (2, 3, 4):
            driver = harness.view(epoch=epoch)
            driver.recover(epoch)
            driver.abort(Lease(owner, epoch))
            owner = f"a{epoch}"
            slice_ = open_slice(driver, owner, epoch=epoch)
            assert slice_.deaths == epoch - 1

    def test_a_driver_that_dies_in_recovery_has_not_died_of_the_messages(self, harness: SourceHarness) -> None:
        """One opening counts one death, however many drivers die before it is opened again."""
        harness.put(numbered(1))
        harness.view(epoch=1).open(lease_of("a", 1), ANY, SEED)
        for epoch in (2, 3, 4):
            harness.view(epoch=epoch).recover(epoch)  # and dies
        last = harness.view(epoch=5)
        last.recover(5)
        last.abort(Lease("a", 5))
        slice_ = open_slice(last, "b", epoch=5)
        assert slice_.deaths == 1

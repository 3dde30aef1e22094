"""Proposals are acted on at most once; a form gives back an edited payload byte by byte; filters are what they say."""

from __future__ import annotations

import threading
from html import escape, unescape

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import QueryParams

from stormproof.core.clock import ManualClock
from stormproof.core.errors import UsageError
from stormproof.trident.web.decide.action import Choice, Look
from stormproof.trident.web.decide.catalogue import ACTIONS, ON_THE_COMMAND_LINE, action_of
from stormproof.trident.web.decide.choosing import canary_numbers, require_chosen
from stormproof.trident.web.decide.letters import edited_bytes, text_to_edit
from stormproof.trident.web.decide.proposals import KEPT_S, Outcome, Proposal, Proposals

DONE = Outcome(("done",), True, "ann")


def proposals(clock: ManualClock | None = None) -> Proposals:
    names = iter(range(10_000))
    return Proposals(clock or ManualClock(), lambda: f"n{next(names)}")


def added(kept: Proposals, holder: str = "ann", pinned: object = None) -> Proposal:
    return kept.add(holder, ACTIONS["drop"], Choice("orders", QueryParams()), Look({}, pinned=pinned))


def test_a_proposal_runs_once_however_many_send_it_at_once() -> None:
    proposal = added(proposals())
    runs: list[int] = []
    barrier = threading.Barrier(8)

    def run() -> Outcome:
        runs.append(1)
        return DONE

    def send() -> None:
        barrier.wait()
        assert proposal.once(run) is DONE

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert runs == [1]


def test_what_fails_unexpectedly_is_not_tried_again() -> None:
    proposal = added(proposals())

    def breaks() -> Outcome:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        proposal.once(breaks)
    again = proposal.once(lambda: DONE)
    assert (again.ok, "may be done in part" in again.lines[0]) == (False, True)


def test_a_proposal_is_its_holders_for_an_hour() -> None:
    clock = ManualClock()
    kept = proposals(clock)
    proposal = added(kept)
    assert kept.find(proposal.nonce, "ann") is proposal
    assert kept.find(proposal.nonce, "eve") is None
    clock.advance(KEPT_S)
    other = added(kept)
    assert kept.find(proposal.nonce, "ann") is None
    assert kept.find(other.nonce, "ann") is other


def test_what_is_held_is_bounded() -> None:
    kept = proposals()
    made = [added(kept, pinned=tuple(range(300_000))) for _ in range(6)]
    assert [kept.find(one.nonce, "ann") is not None for one in made] == [False, False, False, True, True, True]
    many = [added(kept) for _ in range(600)]
    assert kept.find(many[0].nonce, "ann") is None
    assert kept.find(many[-1].nonce, "ann") is many[-1]


def through_a_browser(text: str) -> str:
    """What a browser sends of a form's large text that nobody touched: its value has each line end as CR LF."""
    read = unescape(escape(text)).replace("\r\n", "\n").replace("\r", "\n")  # as the parser reads it
    return read.replace("\n", "\r\n")


@given(st.binary(max_size=60) | st.text(alphabet="ab\r\n\t{}\x00é", max_size=30).map(str.encode))
def test_a_payload_that_may_be_edited_comes_back_as_it_was(payload: bytes) -> None:
    text = text_to_edit(payload)
    if text is not None:
        assert edited_bytes(payload, through_a_browser(text)) == payload


@pytest.mark.parametrize("payload", [b"\xff", b"a\x00b", b"a\r\nb\nc", b"a\rb", b"\x1b[0m"])
def test_a_payload_that_a_browser_would_change_is_not_offered(payload: bytes) -> None:
    assert text_to_edit(payload) is None


@pytest.mark.parametrize("payload", [b"", b"a\nb", b"a\r\nb\r\n", '{"n": "é"}'.encode(), b"\n\n"])
def test_an_ordinary_payload_is_offered(payload: bytes) -> None:
    assert text_to_edit(payload) is not None


def test_nothing_is_chosen_by_an_empty_filter() -> None:
    assert require_chosen((), is_empty=True, every=False) is not None
    assert require_chosen(("1-1",), is_empty=True, every=False) is None
    assert require_chosen((), is_empty=False, every=False) is None
    assert require_chosen((), is_empty=True, every=True) is None
    with pytest.raises(UsageError):
        require_chosen(("1-1",), is_empty=True, every=True)


def test_a_canarys_numbers_are_read_or_refused() -> None:
    assert canary_numbers({}) is None
    assert canary_numbers({"canary": "10", "max_failures": "0.05", "wait": "60"}) == (10, 0.05, 60.0)
    for wrong in ({"canary": "ten"}, {"max_failures": "0.1"}, {"canary": "1", "wait": "soon"}):
        with pytest.raises(UsageError):
            canary_numbers(wrong)


def test_every_persons_decision_is_on_the_page_or_says_why_not() -> None:
    commands = {
        *("dead-letters requeue", "dead-letters drop", "dead-letters edit"),
        *("pause", "resume", "drain", "stop", "retry", "ledger skip", "ledger skip --rows", "ledger adopt"),
        *("ledger accept-change", "ledger accept-loss", "ledger adopt-table", "ledger release-table", "ledger prune"),
    }
    assert len(ACTIONS) == len(commands)
    assert set(ON_THE_COMMAND_LINE) == {
        *("compact", "vacuum", "repair", "queue adopt", "ledger migrate", "forget", "queue unsubscribe"),
    }
    with pytest.raises(UsageError, match="there is no decision"):
        action_of("explode")

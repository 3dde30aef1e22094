"""Proposals are acted on at most once; a form gives back an edited payload byte by byte; filters are what they say."""

from __future__ import annotations

import inspect
import threading
from html import escape, unescape
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import QueryParams

from stormproof.core.base.clock import ManualClock
from stormproof.core.base.errors import UsageError
from stormproof.trident.decisions.canary import CanaryRules
from stormproof.trident.declarations.decisions import DECISIONS, ELSEWHERE, DecisionPreview, on_the_page
from stormproof.trident.web.proposals import (
    KEPT_S,
    DecisionOutcome,
    DecisionSubject,
    Given,
    Proposal,
    Proposals,
    edited_bytes,
    require_chosen,
    text_to_edit,
)

DROP = "stormproof dead-letters drop orders"
DONE = DecisionOutcome(("done",), True, "ann")


def proposals(clock: ManualClock | None = None) -> Proposals:
    names = iter(range(10_000))
    return Proposals(clock or ManualClock(), lambda: f"n{next(names)}")


def added(kept: Proposals, holder: str = "ann", messages: int = 0) -> Proposal:
    look = DecisionPreview({}, messages, fixed={"chosen": range(messages)} if messages else {})
    return kept.add(holder, on_the_page("drop"), DecisionSubject("orders", {}), look)


def test_a_proposal_runs_once_however_many_send_it_at_once() -> None:
    proposal = added(proposals())
    runs: list[int] = []
    barrier = threading.Barrier(8)

    def run() -> DecisionOutcome:
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

    def breaks() -> DecisionOutcome:
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
    made = [added(kept, messages=300_000) for _ in range(6)]
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
    requeue = on_the_page("requeue")
    given = Given.of(requeue, "ann", QueryParams(canary="10", max_failures="0.05", wait_s="60"))
    assert CanaryRules.of(*given.values.values()) == CanaryRules(10, 0.05, 60.0)
    assert CanaryRules.of(None, None, None) is None
    with pytest.raises(UsageError, match="belong to a canary"):
        CanaryRules.of(None, 0.1, None)
    for wrong in ({"canary": "ten"}, {"wait_s": "soon"}):
        with pytest.raises(UsageError, match="is no number"):
            Given.of(requeue, "ann", QueryParams(wrong))


def test_what_an_address_lacks_is_named() -> None:
    skip = on_the_page("skip")
    assert DecisionSubject.of(skip, "orders", QueryParams(txid=" 7 ")).missing == ("Sink",)
    assert DecisionSubject.of(skip, "orders", QueryParams(txid="7", sink="a b")).values == {"txid": 7, "sink": "a b"}
    with pytest.raises(UsageError, match="Txid: '7x' is no number"):
        DecisionSubject.of(skip, "orders", QueryParams(txid="7x"))


@pytest.mark.parametrize(
    ("name", "values", "command"),
    [
        ("skip-rows", {"txid": 7, "sink": "a b"}, "stormproof ledger skip orders 7 'a b' --rows"),
        ("pause", {}, "stormproof pause orders"),
        ("accept-loss", {"fingerprint": "0ab"}, "stormproof ledger accept-loss orders 0ab"),
        ("adopt-table", {"sink": "s", "accept_loss": True}, "stormproof ledger adopt-table orders s --accept-loss"),
        ("drop", {"id": ("1-1", "1-2"), "all": False}, f"{DROP} 1-1 1-2"),
        ("requeue", {"id": (), "all": True}, "stormproof dead-letters requeue orders --all"),
        (
            "drop",
            {"id": (), "error_class": "23", "first": 4},
            f"{DROP} --error-class 23 --first 4",
        ),
        ("edit", {"id": "1-1"}, "stormproof dead-letters edit orders 1-1 --payload FILE"),
    ],
)
def test_the_page_says_the_same_at_a_shell(name: str, values: dict[str, Any], command: str) -> None:
    assert on_the_page(name).shell("orders", values) == command


def test_every_decisions_work_takes_what_is_declared() -> None:
    for one in (one for one in DECISIONS if one.made):
        given = {name: object() for name in (*(field.name for field in one.fields), *one.preset, "by", "why")}
        inspect.signature(one.works()).bind(object(), object(), **given)
    for one in (one for one in DECISIONS if one.look):
        chosen = {name: object() for name in (*(field.name for field in one.choice), *one.preset)}
        inspect.signature(one.looks()).bind(object(), object(), **chosen)


def test_every_persons_decision_is_on_the_page_or_says_why_not() -> None:
    shown = [one.name for one in DECISIONS if one.look]
    assert len(shown) == len(set(shown))
    not_shown = {one.command for one in DECISIONS if not one.look}
    assert ELSEWHERE.keys() == not_shown | {"ledger migrate"}
    with pytest.raises(UsageError, match="there is no decision"):
        on_the_page("explode")

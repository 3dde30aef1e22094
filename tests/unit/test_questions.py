"""A question of the audit is declared by its view and the lines above it, and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
import typer

from stormproof.migrations import revision
from stormproof.trident.cli.subcommands import command_of
from stormproof.trident.declarations.questions import QUESTIONS, declared

VIEWS: Final = Path(__file__).parents[2].joinpath("migrations", "views.sql").read_text()
ONE_MORE: Final = """
-- question: slow
-- asks: Which batches took longest?
-- says: Show the batches by how long they took.
-- example: stormproof audit slow orders
-- order: took desc, txid
-- fails: what=too_slow
create view stormproof.audit_slow (topology, what, at, txid, took) as select 'orders', 'too_slow', now(), 1, 2;
comment on view stormproof.audit_slow is 'one row a batch';
comment on column stormproof.audit_slow.topology is 'the topology''s name';
comment on column stormproof.audit_slow.what is 'slow or too_slow';
comment on column stormproof.audit_slow.at is 'when it ended';
comment on column stormproof.audit_slow.txid is 'the batch''s number';
comment on column stormproof.audit_slow.took is 'seconds from open to commit';
"""


def test_a_thirteenth_question_is_one_view_with_its_lines() -> None:
    found = declared(VIEWS + ONE_MORE)
    one = found["slow"]
    assert [*found] == [*QUESTIONS, "slow"]
    assert (one.view, one.filters, one.time, one.txid, one.page) == (
        "stormproof.audit_slow",
        ("what",),
        "at",
        "txid",
        "question",
    )
    assert one.is_failed_by({"what": "too_slow"})
    assert not one.is_failed_by({"what": "slow"})


def test_its_command_has_an_option_for_each_filter_and_says_what_the_column_means() -> None:
    app = typer.Typer()
    app.command()(command_of(declared(ONE_MORE)["slow"]))
    made = typer.main.get_command(app)
    told = {one.opts[-1]: getattr(one, "help", None) for one in made.params}
    assert (made.help or "").startswith("Show the batches by how long they took.")
    assert told["--what"] == "Filter: slow or too_slow."
    assert told.keys() >= {"--txid", "--what", "--since", "--until", "--group", "--limit", "--json"}


def test_what_a_question_is_called_changes_no_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    from stormproof import migrations

    before = revision.__wrapped__()
    monkeypatch.setattr(migrations, "_text", lambda: VIEWS)
    views = revision.__wrapped__()
    monkeypatch.setattr(migrations, "_text", lambda: VIEWS.replace("-- asks: What became", "-- asks: What has become"))
    assert revision.__wrapped__() == views != before
    monkeypatch.setattr(migrations, "_text", lambda: VIEWS.replace("as txid ' ||", "as the txid ' ||"))
    assert revision.__wrapped__() != views

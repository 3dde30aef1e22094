"""Writes docs/audit.md from the views' own descriptions: `.venv/bin/python tools/audit_doc.py`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Final

from stormproof.trident.declarations.questions import QUESTIONS, described

ROOT: Final = Path(__file__).resolve().parents[1]
PATH: Final = ROOT / "docs" / "audit.md"
HEAD: Final = """# Audit: the questions

The ledger records what was applied, when, by which batch, how often it was tried and why. Each question has a command
and an SQL view. Made by `tools/audit_doc.py` from the views' own descriptions: do not edit.

    stormproof audit replays orders --since 1d --group reason --group component --group hour
    stormproof audit dead-letters --group topology --group error_class
    stormproof audit behind --json

A command takes a topology, or none for all of them; `txn`, `message`, `components` and `verify` require one. Filters are
in [cli.md](cli.md#stormproof-audit). With `--json` an answer has the keys `question`, `view`, `asked`, `rows` and
`left_out`.

Exit status:

- 0: there is an answer, perhaps an empty one
- 1: `behind`: a sink is behind a blocked batch. `aborted`: a listed batch is blocked now. `verdicts`, `verify`: a violation
- 2: the topology, filter or group is unknown
- 4: `verdicts`, `verify`: cannot tell, or not all was compared. `verdicts`: the topology has none

## SQL

Of the [views](#the-views) in the schema `stormproof` columns are only added. A BI tool's role needs:

    grant usage on schema "stormproof" to reader;
    grant select on stormproof.audit_replays, stormproof.audit_txn to reader;  -- and the others that it shows

No view shows a payload or an error's text. The commands `message`, `txn` and `aborted` show more and need an auditor's
[role](deployment.md#grants). Over a ledger of 10,000,000 messages in 100,000 batches a question takes less than a
quarter of a second; `attempts` takes 0.6 s, and `recovered` and `replays --group` some 1.5 s.

## What a sink has of a batch

`status`, `audit behind`, `audit txn`, `audit message` and the page report `has_it`, `has_it_not` or `not_asked` for
each sink. Where the ledger does not know (the batch is blocked or was given back, or its driver is dead or silent),
they ask the sink; the views do not. `not_asked` has a `why`: the store cannot be reached or keeps no record of txids, a
driver is committing the batch right now, or it is not yet on record which messages the sink rejected.

`committed_at` is by the clock of the sink's store, or the driver's for stores that keep no time (memory, key-value
stores, a sink of your own). `rows` counts prepared rows, `rejected` ones included.

## Message ids

Lists show a broker's own id as `server_id`. Commands and the page's search take either id:

| source | id on record | the broker's id |
| --- | --- | --- |
| Kafka | `0-42`: place and offset | `orders-3@42`: topic, partition, offset |
| RabbitMQ queue, Kestrel | `0-42` | the id that `id_from` names, if any |
| RabbitMQ stream | `0-42` | the offset, `42` |
| Redis stream | `0-42` | the entry's id, `1700000000000-1` |
| NATS JetStream | `0-42` | the stream's sequence |

An id that could be either is the one on record; `=ID` is always the broker's. With several spouts, `SPOUT:ID` searches
one. An id that was never opened is unknown (exit status 2).

## What is not on record

- **A message that succeeded at once** has no row of its own. `audit message` finds its batch by the slice that holds
  the id. If the source has removed messages of the slice, the answer is `unproven`: it was removed, or never existed.
- **Which messages had rows at a sink for which a batch was skipped**: each is `skipped`; `audit dead-letters` has one
  row for the batch.
- **Steps of a batch whose driver died before prepare**, but for the times of its row.
- **What was never opened**: the command `pending` asks the source.
- **What was pruned.**
- **Components of attempts that were repeated, of batches that were given back, and of `exactly_once`.**
"""
VERIFY: Final = """## Verify

- `stormproof audit verify orders`: ledger, source and each sink's own record: each txid once and in order. No table is read
- `... --deep`: also the rows of the tables, and committed messages that the source still keeps
- `... --since last`: [what came](#incremental-verify) since the last clean verdict of the same scope
- `... --since TXID`, `--since TIME`: from a txid on, or from the first one that had not ended at that time
- `... --deep --sink NAME`: the table of that sink alone
- `... --deep --others-write`: rows that other writers added are no violation

| verdict | meaning | exit status |
| --- | --- | --- |
| `clean` | everything that was compared agrees. Without `--deep` the last line says that rows were not compared | 0 |
| `violation` | something was lost, duplicated or changed | 1 |
| `not_compared` | all else agrees, but of some sinks not all was compared; a note `not_compared` gives the reason for each | 4 |
| `cannot_tell` | evidence is gone or out of reach | 4 |

Each verdict is kept with its time and scope, except by a role that may only read, or on a standby. A driver may run
meanwhile: each table is read at one instant.

### As a gate of a deployment

Of some tables `--deep` never compares all, such as an upsert without `lineage=True`
[from its first batch on](#deep-verify): the status is 4 each time. A gate that takes this asks for the verdict:

```sh
stormproof audit verify orders --deep --json | jq -e '.verdict | IN("clean", "not_compared")'
```

### Incremental verify

`--since last` begins after the last txid up to which, at the previous clean verdict, every batch had ended and no
message waited for a retry: a chain of clean verdicts has no gap (`chain_from` is its first txid). Everything is checked
(`all_checked`) if there is no such verdict, a table was restored or changed by other means since, a batch reads again
what was given back, or the ledger was pruned beyond the verdict.

Run a check without `--since` regularly, for example daily. Only that finds later changes of what was checked, a batch
that reads a part of an older one again, and a single Kafka partition that was moved back.

### Payloads

The SHA-256 of the payload of each retry, dead letter and reject (with its row) is kept. `audit verify` names those that
have changed (`payload_changed`), and `dead-letters requeue` refuses them: use `edit` or `drop`.

`--deep` also names committed messages that were altered, or removed other than by the rules of their source:

| source | compared | by |
| --- | --- | --- |
| Postgres queue | each slice, until its partition is dropped | a hash of ids and payloads |
| NATS, Redis, RabbitMQ queues, Kestrel | each message, until an hour after it was resolved; not its metadata | the SHA-256 of the payload, and numbers without gaps |
| files, also in object stores | each file that is there under its name | digests of blocks of lines, or of the columns of row groups |
| Kafka, RabbitMQ streams, streaming queries, jobs | nothing: `not_compared` | |

### Rows that changed nothing

A row of an upsert that is older than the table's row of its key is *superseded*. Which rows is not on record; their
number for each txid is compared between ledger, sink and prepared files (`evidence_differs`). Where Spark commits to
Delta, and where a sink's `Evidence.superseded` is None, there is a notice (`superseded_not_compared`); under the weaker
guarantees nothing.

### Deep verify

`--deep` reads every row. With `content_digests` (on for `PostgresSink`, off for `DeltaSink`) each file prepared for an
append has a digest: its number of rows and the sum of their hashes. It takes a task 10 to 200 ns a row, up to a third
of the time of writing the file, misses an accidental change with a chance of about 2^-64, and is no defence against
rows that somebody computes to fit.

- **Delta, append**: each live file by its SHA-256. Rows that OPTIMIZE or Spark moved: by content, with `content_digests`
- **the same, committed by Spark**: likewise, except partitioned tables, and mapped tables whose columns were changed
- **Postgres, append**: with `lineage=True` txid by txid; otherwise all rows as one sum, if every batch has a digest
- **upsert, fold, map**: no key twice; the number of keys against those inserted; in a fold, each summed column (count, sum, mean)
- **map**: also all values: value, previous value, txid, incarnation. Not a key-value store or state class of yours
- **upsert, fold with `lineage=True`**: also all values, and the txid and message that each row names. Not where Spark commits; not after a batch of more than 1,000,000 rows (Delta); not after rows whose columns differ from those before; not in Postgres tables with AFTER UPDATE triggers or an ON UPDATE CASCADE reference to themselves

Values of rows that may be overwritten are compared as one sum of hashes over the table: a difference names no row or
txid. With `lineage=True` a commit reads the rows that it replaces: two look-ups by key in Postgres, one pass over the
table in Delta. Keys are compared in 128 MB of memory; more than 16 million take several passes.

`not_compared` lists what was left out:

- rows of batches that were pruned (Delta), that ran under a weaker guarantee, or that have no digest;
- rows of a Postgres table with INSERT triggers;
- columns that Postgres stores differently from what it is given (jsonb, uuid, arrays, rounded timestamps), and nested
  columns;
- rows moved to files together with rows of other writers, or of txids that are not on record;
- in upserts and folds: the number of rows where Spark commits, or where a Postgres table had rows before; sums where
  the table had rows before, or NaN or an infinity was added;
- values of a Delta table after another writer changed rows, or after `stormproof repair` removed some; in Postgres that
  is a difference;
- rows that were there before the first txid, and rows of other incarnations in a restored table.

Tests plant these changes in Delta and Postgres tables, appended and upserted, with lineage and without. All are found,
except in a table that is named here, which the report calls not compared:

TABLE
## The report file

[`stormproof audit report`](cli.md#stormproof-audit-report) writes a JSON file for an auditor:

- `verdict`: of `audit verify`, run for these batches
- `not_looked_at`: what it does not cover
- `topology`, `sinks`, `graphs`, `driver_lives`, `driver_events`: tables, shapes of the graph, runs of the driver, take-overs, recoveries
- `questions`: counts by group, and the newest rows. `sha256` is of the other members as JSON without spaces, keys in order, in ASCII
- `digest`: one SHA-256 over all batches and what they wrote: two reports of one time have the same

Sign it with a key of `ssh-keygen -t ed25519` (or `minisign`), and check it without the ledger:

    ssh-keygen -Y sign -n stormproof-report -f auditkey orders.json       # writes orders.json.sig
    echo "ann@shop $(cat auditkey.pub)" > signers                         # for whoever checks
    ssh-keygen -Y verify -f signers -I ann@shop -n stormproof-report -s orders.json.sig < orders.json


## The views

The view of `audit replays` is `stormproof.audit_replays`, and so on. Every view has `topology`. Unless said otherwise
`txid` is a batch's number, `message` a message's id as commands show it, and `error_class` the class of the exception,
or the reason if there was none. `stormproof ledger sql` prints what every column means.
"""
SHARED: Final = {
    "topology": "the topology's name",
    "txid": "the batch's number",
    "message": "the message's id, as every command shows it",
    "error_class": "class of the exception, or the reason if there was none",
}
"""Columns whose meaning stands above all views."""
FEW: Final = 9
"""A column that is told in no more words is listed by its name alone, unless its values are."""
LISTED: Final = ("what", "state", "reason", "cause", "kind")
"""Columns whose meaning is a list of values."""


def planted() -> str:
    """The changes that tests plant in tables, and where one is not found: a list of the page."""
    sys.path.insert(0, str(ROOT / "tests"))
    plants = importlib.import_module("support.plants")
    tables = list(plants.TABLES)
    return "".join(
        _change(what, [one for one in tables if one not in found and plants.can_be(what, one)])
        for what, found in plants.FOUND.items()
    )


def _change(what: str, missed: list[str]) -> str:
    return f"- {what}" + (f": not in `{'`, `'.join(missed)}`" if missed else "") + "\n"


def text() -> str:
    """The page."""
    told = described()
    parts = [HEAD, VERIFY.replace("TABLE\n", planted() + "\n")]
    for name in (one for one in told if "." not in one):
        columns = [(one.partition(".")[2], meaning) for one, meaning in told.items() if one.startswith(f"{name}.")]
        question = name.removeprefix("audit_").replace("_", "-")
        asks = f"{QUESTIONS[question].asks} " if question in QUESTIONS else ""
        heading = "`stormproof.audit_edges`" if name == "audit_edges" else f"`stormproof audit {question}`"
        parts.append(f"### {heading}\n\n{asks}{told[name][0].upper()}{told[name][1:]}.\n")
        own = [(column, meaning) for column, meaning in columns if SHARED.get(column) != meaning]
        plain = [column for column, meaning in own if column not in LISTED and len(meaning.split()) <= FEW]
        lines = [f"- `{column}`: {meaning}" for column, meaning in own if column not in plain]
        lines += [f"- `{'`, `'.join(plain)}`"] if plain else []
        parts.append("\n".join([*lines, ""]))
    return "\n".join(parts)


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")

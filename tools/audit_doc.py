"""Writes docs/audit.md from the views' own descriptions: `.venv/bin/python tools/audit_doc.py`.

The plans and times beside it, audit_plans.json, were measured over the ledger of the benchmark P11.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any, Final

from stormproof.trident.declarations.questions import QUESTIONS, described

ROOT: Final = Path(__file__).resolve().parents[1]
PATH: Final = ROOT / "docs" / "audit.md"
PLANS: Final = Path(__file__).with_name("audit_plans.json")
HEAD: Final = """# Audit: the twelve questions

What was applied when, by what, how often it was tried and why: the ledger knows, and each question has a command and a view.
Made by `tools/audit_doc.py` from the views' own descriptions: do not edit.

    stormproof audit replays orders --since 1d --group reason --group component --group hour
    stormproof audit dead-letters --group topology --group error_class
    stormproof audit behind --json

Each command takes a topology, or none for all of them (`txn`, `message`, `components` and `verify` take one), and `--json`. Filters,
`--group` and `--limit` (100 rows) are in [cli.md](cli.md); how many rows a limit left out is said. `--since` and `--until` take a
time in ISO 8601 or an age, as `12h`.

`audit replays --json` always has the keys `question`, `view`, `asked`, `rows`, `left_out` (as all of these questions) and
`histories`: of one topology without a filter or `--group` an object with `messages`, `batches`, `attempts`, `suppressed` and their own
`left_out`; else null.

| exit status | of |
| --- | --- |
| 0 | an answer, also an empty one |
| 1 | `behind`, if a sink is behind because a batch is blocked; `aborted`, if a batch that is shown is blocked now; `verdicts` and `verify`, of a violation |
| 2 | a topology, filter or group that is not known |
| 4 | `verdicts` and `verify`: cannot tell; `verdicts` of a topology that has none |

## From SQL

The views are in the schema `stormproof` and are stable: columns are only added. A BI tool's role needs no more than this:

    grant usage on schema "stormproof" to reader;
    grant select on stormproof.audit_replays, stormproof.audit_txn to reader;  -- and whichever else it shows

No view shows a payload, or the text of an error, which may quote one: errors are told by their class. The commands show more of
`message`, `txn`, `aborted` and `replays`; their role is that of an auditor (`stormproof ledger sql --grants`).

## What a sink has of a batch

`status`, `audit behind`, `audit txn`, `audit message` and the page say of each sink `has_it`, `has_it_not` or `not_asked`. Where the ledger
does not say it, since the batch is blocked, its driver is dead or silent, or it was given back, they ask the sink's own record: the log of
a Delta table, the table `stormproof_sink.evidence` beside a Postgres table. `not_asked` comes with `why`: the store cannot be reached,
it keeps no record of txids, a driver is committing the batch just now; or, of a message, the sink has the batch without rows that it
rejected, and of which messages is on record once the batch is committed.

`committed_at` is the commit's own time, by the clock of the sink's store, also where a later run found it and recorded it. Of a store
that keeps no such time (memory, a key-value store, a sink of your own) it is the driver's: right after the commit, or when recovery
found it. Rejected rows are counted apart (`rejected`); `rows` are those that were prepared.

The views know what the ledger knows: in `audit_behind` a batch counts until a driver has recorded that the sink has it.

## Verdicts

`stormproof audit verify` keeps each verdict with its time and its scope: the first and the last txid that it looked at, and how
far the record had been pruned. A verdict says nothing of what it did not look at. A role that may only read, or a standby, keeps
none: the command says so, and its exit status is the verdict's all the same. A role of the kind auditor may add a verdict and
change none. `stormproof ledger prune` removes verdicts that are older than its horizon; the newest of each kind and scope stays.

## The report file

`stormproof audit report TOPOLOGY --out FILE` writes one file of JSON for an auditor. `--since` and `--until` choose batches by when
they were opened; `--message ID` adds the history of a message; `--rows` is how many rows each list has, and what a list left out is
said. `--deep` reads the rows of the sinks' tables, too, as `audit verify --deep` does: the verdict then is of them as well. Of a
partitioned table a difference names the partition. The exit status is the verdict's.

| part | what it has |
| --- | --- |
| `verdict` | of `audit verify`, run for the report's batches; or with `--verdict N` one on record. A clean one that did not look at all of the batches counts as "cannot tell" |
| `not_looked_at` | all that a reader might take for said |
| `topology`, `sinks`, `graphs`, `driver_lives`, `driver_events` | its tables, the shapes of its graph, the runs of its driver, take-overs and recoveries |
| `questions` | the answers to questions 1 to 12: counts by group, and the newest rows; of batches those that did not simply commit, and sums by state, sink, step and day. `sha256` is of the answer's other members as JSON without spaces, keys in order, in ASCII |
| `digest` | one SHA-256 of all batches and of what they wrote: two reports of one time have the same |

No payload is in it, and no text of an error. With `--payload-digests` it has the SHA-256 and the length of the payloads of dead letters and
rejects; a short payload can be guessed from its digest.

The report is signed, and checked without the ledger, by a tool for that. With a key of `ssh-keygen -t ed25519`:

    ssh-keygen -Y sign -n stormproof-report -f auditkey orders.json       # writes orders.json.sig
    echo "ann@shop $(cat auditkey.pub)" > signers                         # who checks has this file
    ssh-keygen -Y verify -f signers -I ann@shop -n stormproof-report -s orders.json.sig < orders.json

The last command ends with status 0 if not one byte was changed since it was signed with that key. `minisign -Sm orders.json` does as well.

## Messages' ids

A broker has ids of its own. Lists show them as `server_id`; each command and the page's search take either id:

| source | the record's id | the broker's own |
| --- | --- | --- |
| Kafka | `0-42`: place and offset | `orders-3@42`: topic, partition, offset |
| RabbitMQ queue, Kestrel | `0-42` | the id that `id_from` names; without one there is none |
| RabbitMQ stream | `0-42` | the offset, `42` |
| Redis stream | `0-42` | the entry's id, `1700000000000-1` |
| NATS JetStream | `0-42` | the stream's sequence |

Where an id could be either, it is the record's; `=ID` is always the broker's. Of several spouts it may stand behind `SPOUT:`;
without, it is looked for in all of them. An id is read strictly, and one that no message has is unknown (exit status 2). Of an
offset that was never opened only the broker can tell, so it is unknown, too.

## What is not on record

- A message that succeeded at its first attempt has no row of its own, so that a message costs the ledger nothing:
  `stormproof audit message` finds its batch by the slice that holds it. An id inside a slice is no proof of a message: where the
  source still has all of the slice's messages, an id that is none of theirs is refused (exit status 2). Where the source has
  removed some, the answer is `unproven`: the id is inside the slice that a txid read (`in_source` is false), and the message
  was removed after it was read, or there was never such a message. Rows of it can be looked up in sinks that store ids.
- Of a batch that an operator gave up at a sink (`ledger skip`), the ledger does not say which messages had rows there: it was
  every row, so each message of the batch is `skipped`, with who and why, and `audit dead-letters` has one row for the batch.
- Postgres tables have no versions.
- How long the steps of a batch took is recorded when its content is fixed, and when it ends. Of one whose driver died before
  that, the times of its row are known.
- What waits in a source and was never opened is not in `audit_pending`: the command asks the source.
- What a prune removed is in no view.
- What components did in attempts that were followed by another one, or in a batch that was given up, is not counted: it was
  done again. A batch that runs again for one sink alone, since its table refused a group's row, keeps the counts of the attempt that
  fixed its content: they have that group's tuples, too, and `audit txn` the rows that the sink got in the end.
- Of micro-batches and jobs that go straight to sinks (`exactly_once`), whose rows Spark computes, there is
  no record of components and edges: `audit txn` has the rows of each sink. A topology that a query feeds has it.

## What it costs

The views read what the ledger records anyway; the driver writes nothing for them, but for `audit_components` and `audit_edges`: a
row for each component and each edge in each batch, in the statement that fixes the batch's content. Tasks count by record batch,
and the counts travel in the tasks' reports. Two indexes are the views': one of verdicts, and one of journal entries that came
again, which a message that comes once does not enter.
"""
COST: Final = """Times below: a ledger of 10,000,000 messages in 100,000 batches, the median of three, 2 cores under a load of 7, with
the query and its plan (`python -m benchmarks P11` measures it anew).
"""


VERIFY: Final = """## Verify

| command | what is compared |
| --- | --- |
| `stormproof audit verify orders` | ledger, source, and each sink's own record: each txid once, in order; no table is read |
| `... --deep` | the rows of the sinks' tables, too: changed, deleted, added and doubled rows; and the committed messages that the source still keeps |
| `... --since last` | what came since the last clean verdict of the same scope; a chain of such verdicts has no gap |
| `... --since TXID` or `--since TIME` | from a txid on, or from the first one that had not ended at a time |

A verdict says its scope, and how far it reaches; nothing that was not compared is clean. Exit status: 0 clean, 1 a violation, 4 it cannot
tell, or not all was compared; the last line says which:

| verdict | it says | status |
| --- | --- | --- |
| `clean`, without `--deep` | records agree; rows not compared: `--deep` | 0 |
| `clean`, with `--deep` | clean, the rows of 3 sinks compared; with `--sink` of those sinks alone, `of 3 in all` | 0 |
| `not_compared` | clean, 2 of 3 sinks not compared (or not in full): their names. Why not, `note not_compared` says of each | 4 |
| `cannot_tell` | evidence is gone or out of reach | 4 |
| `violation` | something is wrong | 1 |

### Payloads that were set aside

When a message becomes a retry, a dead letter or a reject, the SHA-256 of its payload (of a reject: of payload and row) is kept with it. `audit
verify` names each that is another now (`payload_changed`), and `dead-letters requeue` refuses it: `edit` or drop it.

### Messages that the source still keeps

`--deep` compares committed messages with what is on record of them, as long as the source keeps them; one that was altered or removed since is
named (`payload_changed`). What a source has let go of by its own rules is not compared, and no alarm.

| source | on record | compared |
| --- | --- | --- |
| Postgres queue | a hash of ids and payloads, taken by the server when a slice is opened, in the txid's position | each slice, up to the drop of its partition |
| journal: NATS, Redis, RabbitMQ queues, Kestrel | the SHA-256 of each payload; numbers without gaps | each message, up to an hour after it was resolved; not the metadata beside the payload |
| files, also in object stores | digests of each block of lines, or of each row group's columns, taken when a file is registered | each file that is there under its name |
| Kafka, RabbitMQ streams | nothing but the position | nothing: `not_compared` |
| streaming queries, jobs | nothing is kept for them | nothing |

MESSAGES

### Rows that changed nothing

Of the rows that an upsert was given, each is in the table, is rejected, was dropped by the table's own trigger, or changed nothing, since a
later row of its key was there. For each txid `audit verify` compares how many changed nothing: by the ledger, by the sink's own record, and
with what the prepared files allow. A row that a later one of the batch superseded changed nothing, unless it took the place of a rejected
one, or the table's rows exclude each other, so that each was put; a row that the table took may have changed something, or nothing.

| table | compared |
| --- | --- |
| Postgres, Delta by delta-rs, memory | the ledger's number with the sink's, and both with the prepared rows |
| Delta by Spark | the ledger's number with the log's; not with the prepared rows: Spark's figures count the rows of a task that ran again twice |
| a sink whose `Evidence.superseded` is None | nothing: its record does not say |
| under at-least-once and at-most-once | nothing: a txid may have been written twice |

A difference is a violation (`evidence_differs`); what was not compared with the prepared rows is a notice (`superseded_not_compared`).
Which rows they were is not on record, only how many: that the later row won is compared by `--deep` as far as the table below says.

### Deep verify

With `content_digests` of the sink (`PostgresSink`: on; `DeltaSink`: off) each file that a task prepares for an append has a content
digest: the number of its rows and the sum of their hashes, which is the same for the same rows in any order and in any files. An
accidental change goes unnoticed with a probability of about 2^-64. It is no defence against somebody who computes rows to fit it.
It takes a task 10 to 200 nanoseconds a row, by the columns: up to a third of the time of writing the file, and as much again for
lines of 100 bytes.

| table | how its rows are compared |
| --- | --- |
| Delta, append | each live file by its SHA-256; rows that OPTIMIZE or Spark moved to other files, by the content of those files, with `content_digests` |
| Delta, append, committed by Spark | likewise, with column mapping and with deletion vectors, too; not partitioned tables, and not once columns of a mapped table were changed |
| Postgres, append, with `lineage=True` | txid by txid |
| Postgres, append, without it | all rows of the table as one sum, if every batch has a digest; a difference cannot be laid to a txid |
| upsert, fold and map, in either store | that no key is twice; the number of rows with the keys that the commits inserted by their own record; of a fold, each column that is summed (counts, sums, means) with what the txids added to it |
| map (state), in either store | the values of all rows, too: value, value before, txid and life, with what the txids put. Of a key-value store of yours, and of a state class of yours, nothing: it cannot be read back |
| upsert and fold, with `lineage=True` | the values of all rows, too, among them the txid and the message that each row names; that no txid has more rows than it wrote, and no row a txid that is not on record. Not where Spark commits, nor behind a batch of more than 1,000,000 rows (Delta), or one whose rows have other columns than those before: in Delta lack one, in Postgres lack one or have one more; nor of a Postgres table with triggers AFTER UPDATE, or a reference to itself ON UPDATE CASCADE: they may change other rows |
| upsert and fold, without it | not the values of other columns |

Values of rows that are overwritten are compared as one sum of hashes: each commit records the hashes of the rows that it put, less those of the
rows that it replaced, and the sum over all commits must be that of the table. A difference cannot be laid to a row or a txid. What is replaced a
map has read anyway; an upsert or fold with `lineage=True` reads it in the commit: in Postgres by two look-ups of the batch's keys, in Delta by one
pass over the table, as its MERGE does. Once another writer has changed rows, or `stormproof repair` has removed some, what must be there is no
longer known, and that is said; in Postgres, which has no log of others, it is a difference. Bytes of a file that no row is made of are not compared.

What a commit inserted and added is kept with its evidence: in the metadata of the Delta version, which has the totals of those before it,
too, so that a log that was cleaned up tells enough; and in `stormproof_sink.evidence`. Sums are exact, but for floats: of these a difference
counts that rounding once a commit cannot explain. Keys are compared in 128 MB of memory, however many there are: more than 16 million are
read in several passes.

The report names, as `not_compared`, what was not compared and why. The verdict is then `not_compared`, if all else agrees:

- rows of a batch that an earlier version wrote, that the ledger has pruned (Delta), or whose guarantee is weaker than exactly-once;
- rows of a Postgres table with triggers on INSERT, which may change them, and rows of which triggers dropped some;
- columns whose values Postgres keeps otherwise than they came (jsonb, uuid, arrays, rounded timestamps), and nested columns;
- rows that were moved to files with rows of other writers, or of txids that are not on record;
- of an upsert and a fold, the number of rows where Spark commits (its figures may count a row twice) or rows were there before (Postgres),
  and the sums where rows were there before, or where NaN or an infinity was added;
- rows that were there before the first txid, and tables that hold, or may hold, rows of other lives: a table that was restored
  may have those of each life that wrote to one of its name.

Rows that another writer added are a violation; with `--others-write` they are not. `--sink NAME` reads one sink's table alone.
Rows are read in batches, at one instant of each table; a driver may run meanwhile.

Changes that the tests plant, and in which tables they are found. Elsewhere the report says what it did not compare.

TABLE

### Incremental verify

The check begins behind the last txid up to which, at the verdict before, every batch had ended and no message waited for a
retry. So a chain of clean verdicts has no gap: `chain_from` is its first txid. A verdict that is not clean is not continued, so
the next check looks at the same txids again. What was checked before is not looked at again; that is what a check without
`--since` is for, once a day perhaps. That one alone finds a batch that reads again a part of what an older batch read, and one
partition of Kafka that was moved back while the others went on.

It checks everything, and says so (`all_checked`), where there is no such verdict, where a table was restored or changed by other
means since, where a batch reads again what was given back, and where the ledger was pruned beyond the verdict.
"""


def planted() -> str:
    """Which planted change is found in which table: a table of the page."""
    sys.path.insert(0, str(ROOT / "tests"))
    plants = importlib.import_module("support.plants")
    names = list(plants.TABLES)
    lines = ["| change | " + " | ".join(f"`{name}`" for name in names) + " |", "| --- |" + " --- |" * len(names)]
    for what, found in plants.FOUND.items():
        cells = ["found" if n in found else "-" if not plants.can_be(what, n) else "no" for n in names]
        lines.append(f"| {what} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n\n`-`: there is no such change there.\n"


def planted_messages() -> str:
    """The same of messages that sources keep."""
    plants = importlib.import_module("support.plants")
    kinds: dict[str, str] = plants.MESSAGES
    lines = ["| change | " + " | ".join(kinds.values()) + " |", "| --- |" + " --- |" * len(kinds)]
    for what, found in plants.MESSAGES_FOUND.items():
        lines.append(f"| {what} | " + " | ".join("found" if name in found else "-" for name in kinds) + " |")
    return (
        "Changes that the tests plant there:\n\n" + "\n".join(lines) + "\n\n`-`: the tests make no such change there.\n"
    )


def text() -> str:
    """The page."""
    told = described()
    plans: dict[str, Any] = json.loads(PLANS.read_text(encoding="utf-8"))
    parts = [HEAD, COST] if plans else [HEAD]
    parts.insert(1, VERIFY.replace("TABLE\n", planted()).replace("MESSAGES\n", planted_messages()))
    for name in (one for one in told if "." not in one):
        columns = [(one.partition(".")[2], meaning) for one, meaning in told.items() if one.startswith(f"{name}.")]
        question = name.removeprefix("audit_")
        command = question.replace("_", "-")
        heading = "### Edges" if name == "audit_edges" else f"## `stormproof audit {command}`"
        asks = f"{QUESTIONS[command].asks} " if command in QUESTIONS else ""
        parts.append(f"{heading}\n\n{asks}View `stormproof.{name}`: {told[name]}.\n")
        parts.append(
            "| column | meaning |\n| --- | --- |\n"
            + "".join(f"| `{column}` | {meaning} |\n" for column, meaning in columns)
        )
        for key in (question, f"{question}, grouped"):
            if key in plans:
                plan = plans[key]
                took = f"{plan['rows']} rows in {plan['s']:.2f} s"
                parts.append(f"{took}:\n\n```text\n{plan['sql']};\n\n{plan['plan']}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")

"""Conformance of sinks: prepared files, and what is checked while they are written."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa
import pytest

from stormproof.core.base.errors import SinkRefused
from stormproof.sinks.contract.protocol import CommitOutcome, PreparedTransaction, SinkProblem, SinkSession
from stormproof.testing.sinks.harness import A, B, SinkHarness


class FileCases:
    """What is prepared is what is written, and nothing is left behind."""

    @pytest.mark.parametrize("damage", ["missing", "truncated"])
    def test_a_damaged_file_is_refused_before_anything_moves(
        self, harness: SinkHarness, session: SinkSession, damage: str
    ) -> None:
        """A prepared file that is missing or cut short is named; once it is repaired, the same transaction goes through."""
        folder = harness.prepared_in(session)
        transaction = harness.prepare(session, 1, None, A, tasks=2)
        name = transaction.files[1].path
        content = folder.read(name)
        if damage == "missing":
            folder.remove(name)
        else:
            folder.put(name, content[:-8])
        with pytest.raises(SinkRefused, match=name) as caught:
            session.commit(transaction, checked=True)
        assert caught.value.details["problem"] == SinkProblem.FILE_LOST
        assert session.held() is None
        assert harness.rows() == Counter()
        # Repaired, the very same transaction goes through.
        folder.put(name, content)
        assert session.commit(transaction, checked=True).outcome is CommitOutcome.APPLIED
        assert harness.rows() == harness.after(A)

    def test_a_wrong_number_of_rows_is_refused(self, harness: SinkHarness, session: SinkSession) -> None:
        """The files must hold as many rows as were prepared."""
        good = harness.prepare(session, 1, None, A)
        with pytest.raises(SinkRefused, match="instead of"):
            session.commit(PreparedTransaction(1, None, good.digest, 3, good.files), checked=True)
        assert session.held() is None
        assert harness.rows() == Counter()

    def test_sweep_removes_only_what_is_dead(self, harness: SinkHarness, session: SinkSession) -> None:
        """A sweep takes prepared files of this life that are dead, and nothing else."""
        folder = harness.prepared_in(session)
        dead = harness.prepare(session, 1, None, A, attempt=1)
        live = harness.prepare(session, 1, None, A, attempt=2)
        foreign = live.files[0].path.replace("inc-1", "inc-2")
        folder.put(foreign, b"another incarnation's")
        folder.put("notes.txt", b"not ours")
        assert session.sweep(lambda txid, attempt, _name: (txid, attempt) == (1, 1)) == 1
        assert not folder.exists(dead.files[0].path)
        assert folder.exists(foreign)
        assert folder.exists("notes.txt")
        assert session.commit(live, checked=True).outcome is CommitOutcome.APPLIED
        assert harness.rows() == harness.after(A)

    def test_a_late_file_of_a_dead_attempt_changes_nothing(self, harness: SinkHarness, session: SinkSession) -> None:
        """A file that a task writes after its attempt is over has no effect, and is swept."""
        folder = harness.prepared_in(session)
        good = harness.prepare(session, 1, None, A, attempt=2)
        session.commit(good, checked=True)
        late = harness.prepare(session, 1, None, B, attempt=1)
        assert harness.rows() == harness.after(A)
        assert session.sweep(lambda _txid, attempt, _name: attempt == 1) == 1
        assert not folder.exists(late.files[0].path)
        assert harness.rows() == harness.after(A)

    def test_files_of_repeated_tasks_and_attempts_go_with_their_txid(
        self, harness: SinkHarness, session: SinkSession
    ) -> None:
        """A task that ran twice has written twice under one name but for its end; one of the two is in the transaction."""
        folder = harness.prepared_in(session)
        first = harness.prepare(session, 1, None, B, attempt=1)
        again = harness.prepare(session, 1, None, A, attempt=2)
        counted = harness.prepare(session, 1, None, A, attempt=2)
        following = harness.prepare(session, 2, 1, B)
        session.commit(counted, checked=True)
        session.finished(counted)
        left = folder.names()
        orphans = {first.files[0].path, again.files[0].path}
        if harness.private:
            assert left == {following.files[0].path}
        else:  # the table's folder is not looked through for each batch, but by a start
            assert left == {following.files[0].path, counted.files[0].path, *orphans}
            assert session.sweep(lambda txid, _attempt, name: txid == 1 and name != counted.files[0].path) == 2
        session.commit(following, checked=True)
        mode = folder.mode(following.files[0].path)
        assert mode is None or mode & 0o077 == (0 if harness.private else 0o044)

    def test_keys_that_are_null_are_told_before_the_commit(self, harness: SinkHarness, session: SinkSession) -> None:
        """A key that is NULL is told in the task, so that its message fails alone; other columns take NULL."""
        rows = pa.RecordBatch.from_arrays([pa.array(["a", None], pa.string())], names=["word"])
        assert [row for row, _ in session.writer().check(rows)] == ([1] if harness.input.is_by_key else [])

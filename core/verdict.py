"""The batch verdict: whether the acked shares of a whole batch XOR to the tokens of its messages.

The XOR of many messages' ack vals is again one 64-bit value: zero when every tuple anchored to them was acked, and
otherwise zero only by an accident of probability 2^-64. An XOR is blind to copies whose number is odd; the counts are not.
"""

from __future__ import annotations

from functools import reduce
from operator import xor

from stormproof.core.engine.protocol import JobReport
from stormproof.core.source.protocol import Expectation


def mismatches(report: JobReport, expected: Expectation, *, tracked: bool) -> tuple[str, ...]:
    """What does not add up in an attempt, one text each; empty is the verdict "complete".

    `expected` was computed apart from the read. Messages that failed early are named with their tokens, and only they
    are taken off: a failed message never explains the loss of another.
    """
    found = list(report.violations)
    if report.read_messages != expected.messages:
        found.append(f"{expected.messages} messages were opened, {report.read_messages} were read")
    if report.read_xor != expected.xor:
        found.append("the messages that were read are not those that were opened (XOR of tokens differs)")
    failed_ids = {failure.id for failure in report.failures}
    if len(failed_ids) != len(report.failures):
        found.append(f"{len(report.failures)} failures name {len(failed_ids)} messages: a report was counted twice")
    if tracked:
        failed = reduce(xor, (failure.token for failure in report.failures), 0)
        if report.ack_xor != expected.xor ^ failed:
            found.append("the ack val is not zero: tuples were lost or doubled on their way to the sinks")
    return tuple(found)

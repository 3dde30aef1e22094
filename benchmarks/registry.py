"""The figures by their names."""

from __future__ import annotations

from benchmarks.appends import p12
from benchmarks.audit import p11
from benchmarks.batches import p1a, p1b, p2, p6
from benchmarks.driver_memory import p14
from benchmarks.failures import p10, verdicts
from benchmarks.flat import p9
from benchmarks.from_brokers import p16
from benchmarks.from_kafka import p15
from benchmarks.from_queue import p1q
from benchmarks.groupings import groupings
from benchmarks.harness import Figure
from benchmarks.in_flight import in_flight
from benchmarks.in_store import p18
from benchmarks.latency import p5
from benchmarks.main_job import p3, p4
from benchmarks.page import p17
from benchmarks.pending import p8
from benchmarks.queue_reads import p7
from benchmarks.scale import p19
from benchmarks.slow_service import p20
from benchmarks.upserts import p13

FIGURES: dict[str, Figure] = {
    "P1a": p1a,
    "P1b": p1b,
    "P1q": p1q,
    "P2": p2,
    "P3": p3,
    "P4": p4,
    "P5": p5,
    "P6": p6,
    "P7": p7,
    "P8": p8,
    "P9": p9,
    "P10": p10,
    "P11": p11,
    "P12": p12,
    "P13": p13,
    "P14": p14,
    "P15": p15,
    "P16": p16,
    "P17": p17,
    "P18": p18,
    "P19": p19,
    "P20": p20,
    "groupings": groupings,
    "in-flight": in_flight,
    "verdicts": verdicts,
}

"""The benchmarks' arithmetic and the shape of their JSON; nothing here is timed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from stormproof.core.tracking.share import as_words, xor_reduce

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # they are run from the clone, and installed nowhere

from benchmarks.corpus import WORDS_IN_SENTENCE, sentences, write_corpus  # noqa: E402
from benchmarks.figures import Goal, Pair, Result, Unit, percentile, quartiles  # noqa: E402
from benchmarks.harness import WARM_UPS, Case, measure  # noqa: E402
from benchmarks.options import Options, parse  # noqa: E402
from benchmarks.parquet_source import RepeatedParquet  # noqa: E402

from stormproof.core.contract.source import Lease, Limit, Source  # noqa: E402


def result(unit: Unit, goal: Goal, *pairs: tuple[float, float]) -> Result:
    return Result("P0", "a figure", unit, goal, tuple(Pair(ours, theirs) for ours, theirs in pairs))


def test_the_ratio_is_the_median_of_the_pairs_ratios_and_not_the_ratio_of_the_medians() -> None:
    measured = result(Unit.SECONDS, Goal(ratio=1.0), (1.0, 2.0), (10.0, 20.0), (3.0, 2.0))
    assert measured.ratio == 0.5
    assert measured.ours / measured.theirs == 1.5
    assert measured.is_met


@pytest.mark.parametrize(
    ("unit", "goal", "pair", "met"),
    [
        (Unit.SECONDS, Goal(ratio=1.15), (1.15, 1.0), True),
        (Unit.SECONDS, Goal(ratio=1.15), (1.16, 1.0), False),
        (Unit.SECONDS, Goal(ratio=0.25, own=0.3), (0.31, 2.0), False),
        (Unit.SECONDS, Goal(ratio=0.25, own=0.3), (0.3, 1.0), False),
        (Unit.SECONDS, Goal(ratio=0.25, own=0.3), (0.3, 2.0), True),
        (Unit.MESSAGES, Goal(ratio=10, own=800_000), (900_000, 80_000), True),
        (Unit.MESSAGES, Goal(ratio=10, own=800_000), (700_000, 60_000), False),
        (Unit.MESSAGES, Goal(ratio=10, own=800_000), (900_000, 100_000), False),
        (Unit.TUPLES, Goal(), (1.0, 2.0), True),
        (Unit.BYTES, Goal(own=20), (20.0, 40.0), True),
        (Unit.BYTES, Goal(own=20), (20.1, 40.0), False),
    ],
)
def test_seconds_have_upper_bounds_and_rates_lower_ones(
    unit: Unit, goal: Goal, pair: tuple[float, float], met: bool
) -> None:
    assert result(unit, goal, pair).is_met is met


def test_json_has_what_scripts_rely_on() -> None:
    made = result(Unit.SECONDS, Goal(ratio=1.0), (1.0, 2.0), (2.0, 4.0), (3.0, 5.0)).to_json()
    assert json.loads(json.dumps(made)) == made
    assert (made["ours"], made["theirs"], made["unit"], made["ratio"], made["met"]) == (2.0, 4.0, "s", 0.5, True)
    assert made["runs"] == [
        {"ours": 1.0, "theirs": 2.0, "ratio": 0.5},
        {"ours": 2.0, "theirs": 4.0, "ratio": 0.5},
        {"ours": 3.0, "theirs": 5.0, "ratio": 0.6},
    ]
    assert not {"quoted", "ours_p99"} & made.keys()


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(n) for n in range(1, 101)]
    assert percentile(values, 0.99) == 99.0
    assert percentile([5.0], 0.99) == 5.0
    assert quartiles([4.0, 1.0, 3.0, 2.0]) == (1.0, 3.0)


def side(calls: list[str], name: str, value: float) -> Callable[[], float]:
    def run() -> float:
        calls.append(name)
        return value

    return run


def test_both_sides_run_in_turns_and_warm_ups_are_not_counted() -> None:
    calls: list[str] = []
    seen: list[tuple[int, int]] = []
    case = Case(
        "P0", "", Unit.SECONDS, Goal(), side(calls, "o", 1.0), side(calls, "t", 2.0), pairs_factor=2, shows_p99=True
    )
    measured = measure(case, 2, lambda done, total: seen.append((done, total)))
    total = WARM_UPS + 4
    assert "".join(calls) == ("ot" + "to") * (total // 2) + ("ot" if total % 2 else "")
    assert len(measured.pairs) == 4
    assert seen[-1] == (total, total)
    assert measured.to_json()["theirs_p99"] == 2.0


def test_a_quoted_figure_says_so_and_runs_our_side_alone() -> None:
    calls: list[str] = []
    measured = measure(Case("P3", "", Unit.TUPLES, Goal(ratio=5), side(calls, "o", 6.0), 1.0), 2)
    made = measured.to_json()
    assert made["quoted"] is True
    assert made["met"] is True
    assert set(calls) == {"o"}


def test_the_text_is_the_same_each_time() -> None:
    assert sentences(20).equals(sentences(20))
    assert {len(line.split()) for line in sentences(20).to_pylist()} == {WORDS_IN_SENTENCE}


def test_parquet_files_are_handed_out_round_by_round_with_expectations_of_their_own(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "text", 25, 2)
    source: Source = RepeatedParquet("text", corpus)
    rounds: list[list[int]] = []
    for txid in (1, 2):
        lease = Lease(f"i/{txid}", 1)
        opened = source.open(lease, Limit(25, 2**30), seed=7)
        assert opened is not None
        batches = [b for reader in source.readers(opened, 2) for b in reader.read(7, frozenset(), 10)]
        tokens = np.concatenate([b.column("token").to_numpy() for b in batches])
        assert (len(tokens), xor_reduce(as_words(tokens))) == (opened.expected.messages, opened.expected.xor)
        payloads = [payload.decode() for b in batches for payload in b.column("payload").to_pylist()]
        assert payloads == sentences(25).to_pylist()
        rounds.append([n for b in batches for n in b.column("id").to_pylist()])
        source.pin(lease)
        source.confirm(lease)
    assert rounds == [list(range(25)), list(range(25, 50))]


@pytest.mark.parametrize("arguments", [["P99"], ["P1a", "--pairs", "0"]])
def test_wrong_arguments_are_refused_before_anything_starts(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 2
    assert arguments[-1] in capsys.readouterr().err


def test_all_figures_are_measured_where_none_is_named() -> None:
    everything = (
        "P1a P1b P1q P2 P3 P4 P5 P6 P7 P8 P9 P10 P11 P12 P13 P14 P15 P16 P17 P18 P19 P20 groupings in-flight verdicts"
    )
    assert parse([]) == Options(tuple(everything.split()), None, 15)

"""Every failpoint is reached by a test: the crash matrix takes its cells from the registry, the rest are named here."""

from __future__ import annotations

from pathlib import Path

from stormproof.core.base.failpoint import FAILPOINTS

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
OTHERS = (
    "test_foreach_batch.py",
    "test_dead_letters.py",
    "test_verify_beside_driver.py",
    "test_redelivering.py",
    "test_rejects.py",
    "test_rejected_groups.py",
    "test_compaction.py",
    "test_repair_crashes.py",
)


def test_the_matrix_takes_its_cells_from_the_registry() -> None:
    matrix = "integration/test_crash_matrix.py"
    for cells, check in ((matrix, matrix), ("support/shapes.py", "support/chain.py")):
        assert "FAILPOINTS.values()" in (TESTS / cells).read_text(encoding="utf-8")
        assert "was reached by no start" in (TESTS / check).read_text(encoding="utf-8")


def test_what_the_matrix_leaves_out_is_reached_elsewhere() -> None:
    files = [*(TESTS / "integration").glob("test_postgres_queue*.py"), TESTS / "conformance" / "test_state_crashes.py"]
    files += [TESTS / "integration" / name for name in OTHERS]
    others = "".join(path.read_text(encoding="utf-8") for path in files)
    for point in FAILPOINTS.values():
        if point.scope in ("queue", "journal", "state", "stream", "operator", "audit", "reject", "group", "upkeep"):
            assert point.name in others, f"{point.name} is reached by no test"


def test_every_failpoint_stands_in_the_code_once_declared() -> None:
    code = [
        p for folder in ("core", "sinks", "trident") for p in (ROOT / folder).rglob("*.py") if p.name != "failpoint.py"
    ]
    texts = [p.read_text(encoding="utf-8") for p in code]
    for name in FAILPOINTS:
        assert any(f'failpoint("{name}")' in text for text in texts), f"{name} is declared and stands nowhere"

"""`python -m benchmarks [FIGURE ...] [--json FILE] [--pairs N]`: measures, prints a table, writes JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.figures import Result, Unit, quartiles
from benchmarks.harness import measure
from benchmarks.options import parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is asked for; 0 whether or not the goals are met, which the JSON says, 130 when interrupted."""
    options = parse(arguments)
    # Only now: they import Spark, which a wrong argument should not wait for.
    from benchmarks.appends import JDBC
    from benchmarks.maven_jars import kafka_jars, s3a_jars
    from benchmarks.registry import FIGURES
    from benchmarks.workbench import Workbench

    console = Console(stderr=True)
    bench = Workbench(
        (JDBC,) if "P12" in options.figures else (),
        (
            *(kafka_jars() if "P15" in options.figures else ()),
            *(s3a_jars() if "P18" in options.figures else ()),
        ),
    )
    results: list[Result] = []
    try:
        for name in options.figures:
            for opening in FIGURES[name](bench):
                with _shown(console, name) as show, opening as case:
                    result = measure(case, options.pairs, show(case.key))
                results.append(result)
                console.print(f"{result.key}: {_figures(result)}", highlight=False)
                if options.json is not None:  # after every figure: what was measured survives an interruption
                    _write(options.json, results)
    except KeyboardInterrupt:
        return 130
    finally:
        bench.close()
        if results:
            Console().print(_table(results))
    return 0


@contextmanager
def _shown(console: Console, figure: str) -> Generator[Callable[[str], Callable[[int, int], None]]]:
    """Progress: what is being set up, then which round it is at; plain lines where nobody watches."""
    if not console.is_terminal:
        console.print(f"{figure}: setting up", highlight=False)
        yield lambda key: lambda done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"{figure}: setting up", total=None)
        yield lambda key: lambda done, total: progress.update(task, description=key, completed=done, total=total)


def _table(results: Sequence[Result]) -> Table:
    table = Table(title="ours / theirs: medians, with quartiles; the ratio is the median of the pairs' ratios")
    for heading in ("figure", "ours", "theirs", "ratio", "goal", "met"):
        table.add_column(heading, justify="left" if heading in ("figure", "goal", "met") else "right")
    for result in results:
        ours = [pair.ours for pair in result.pairs]
        theirs = [pair.theirs for pair in result.pairs]
        low, high = quartiles([pair.ratio for pair in result.pairs])
        table.add_row(
            f"{result.key}\n[dim]{result.title}[/dim]",
            _value(result.unit, result.ours, ours),
            "quoted\n" + _number(result.unit, result.theirs)
            if result.is_quoted
            else _value(result.unit, result.theirs, theirs),
            f"{result.ratio:.2f}\n[dim]{low:.2f} to {high:.2f}[/dim]",
            result.goal.text(result.unit),
            "[green]yes[/green]" if result.is_met else "[red]no[/red]",
        )
    return table


def _value(unit: Unit, middle: float, values: Sequence[float]) -> str:
    low, high = quartiles(values)
    return f"{_number(unit, middle)}\n[dim]{_number(unit, low)} to {_number(unit, high)}[/dim]"


def _number(unit: Unit, value: float) -> str:
    if unit is Unit.SECONDS:
        return f"{value:.3f} s"
    return f"{value:,.1f} bytes" if unit is Unit.BYTES else f"{value:,.0f}/s"


def _figures(result: Result) -> str:
    ours, theirs = _number(result.unit, result.ours), _number(result.unit, result.theirs)
    met = "met" if result.is_met else "not met"
    return f"{ours}, theirs {theirs}, ratio {result.ratio:.3f} ({result.goal.text(result.unit)}: {met})"


def _write(path: Path, results: Sequence[Result]) -> None:
    """All results so far, put in place at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.part")
    text = json.dumps({result.key: result.to_json() for result in results}, indent=2)
    beside.write_text(f"{text}\n", encoding="utf-8")
    beside.replace(path)


if __name__ == "__main__":
    sys.exit(main())

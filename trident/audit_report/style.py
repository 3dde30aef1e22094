"""The style of a report's page: for a screen, a telephone and paper."""

from __future__ import annotations

from typing import Final

STYLE: Final = """\
:root {
  color-scheme: light; --ink: #1b1f24; --dim: #5b6470; --line: #d6dae0; --back: #fff;
  --good: #0f6b3a; --bad: #a4161a; --open: #8a5a00; --part: #1a5fc4;
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink); }
body { font: 14px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 78rem; margin: 0 auto; padding: 1.5rem; }
h1 { font-size: 1.7rem; margin: .6rem 0 1rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; padding-top: .7rem; border-top: 2px solid var(--ink); }
h3 { font-size: .95rem; margin: 1.2rem 0 .4rem; }
h4 { font-size: .85rem; margin: .8rem 0 .3rem; color: var(--dim); }
h2 .number { display: inline-block; min-width: 1.9rem; color: var(--dim); }
p { margin: .4rem 0; max-width: 60rem; }
code, pre { font: 12px/1.45 ui-monospace, "DejaVu Sans Mono", Menlo, monospace; }
.unsigned, .signed { padding: .6rem .8rem; border: 1px solid var(--line); border-left: 5px solid var(--dim); }
.unsigned { border-left-color: var(--bad); color: var(--bad); font-weight: 600; }
.verdict { display: inline-block; padding: .5rem .9rem; border: 2px solid currentColor; border-radius: .3rem; }
.verdict { font-weight: 700; }
.verdict.clean { color: var(--good); }
.verdict.violation { color: var(--bad); }
.verdict.cannot_tell { color: var(--open); }
.verdict.not_compared { color: var(--part); }
.from, .none { color: var(--dim); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 12.5px; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem .25rem 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
td { overflow-wrap: anywhere; }
thead th { color: var(--dim); font-weight: 600; white-space: nowrap; border-bottom-color: var(--ink); }
td { min-width: 3rem; }
td.number { text-align: right; white-space: nowrap; }
table.pairs th { width: 13rem; color: var(--dim); font-weight: 500; }
dl { margin: 0; display: grid; grid-template-columns: max-content auto; gap: 0 .6rem; }
dt { color: var(--dim); }
dd { margin: 0; }
pre { overflow-x: auto; padding: .8rem; border: 1px solid var(--line); background: #f7f8fa; max-height: 30rem; }
@media (max-width: 40rem) { main { padding: .8rem; } table.pairs th { width: auto; } dl { display: block; } }
@media print {
  @page { margin: 14mm; }
  body { font-size: 10pt; }
  main { max-width: none; padding: 0; }
  .wide { overflow: visible; }
  table { font-size: 8pt; }
  h2, h3 { break-after: avoid; }
  tr { break-inside: avoid; }
  .machine { display: none; }
  pre { max-height: none; white-space: pre-wrap; overflow-wrap: anywhere; }
}
"""

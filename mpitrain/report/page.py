"""One HTML file that needs nothing else: no network, no scripts, no fonts; light, dark and printed."""

from collections.abc import Sequence
from html import escape

from mpitrain.report.facts import differences, fact_table
from mpitrain.report.losses import LossFile, losses
from mpitrain.report.rates import RateFile, rates
from mpitrain.report.read import Run
from mpitrain.report.sections import figure, learning, timelines, times, traffic
from mpitrain.report.staleness import staleness
from mpitrain.report.tables import column_table

STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1b1d21;--pale:#5b6169;--rule:#d9dce0;
--c0:#0072b2;--c1:#c04f00;--c2:#00795a;--c3:#a3427a;--c4:#8f6400;--c5:#50545a}
@media (prefers-color-scheme:dark){:root{--paper:#15171b;--ink:#e8eaed;--pale:#a2a9b3;--rule:#343940;
--c0:#56b4e9;--c1:#ff9a4d;--c2:#3ddba8;--c3:#e79ac6;--c4:#f0c24b;--c5:#c6cad0}}
@media print{:root{color-scheme:light;--paper:#fff;--ink:#000;--pale:#444;--rule:#ccc;
--c0:#0072b2;--c1:#c04f00;--c2:#00795a;--c3:#a3427a;--c4:#8f6400;--c5:#50545a}section{break-inside:avoid}}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}
body{font:15px/1.5 system-ui,sans-serif;max-width:860px;margin:0 auto;padding:24px 16px;color:var(--ink);
background:var(--paper)}
h1{font-size:1.5em}h2{font-size:1.15em;margin:2em 0 .4em}p,li{color:var(--pale);font-size:.88em;margin:.4em 0}
h1,h2,th,td,li,p{overflow-wrap:anywhere}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.88em}
th,td{text-align:left;padding:3px 18px 3px 0;border-bottom:1px solid var(--rule);vertical-align:top;min-width:7em}
th{font-weight:600}svg{max-width:100%;vertical-align:middle}section>svg{width:100%;height:auto;display:block}
ul.legend{list-style:none;padding:0;margin:0;display:flex;flex-wrap:wrap;gap:2px 20px}
pre{font-size:.8em;overflow-x:auto}summary{cursor:pointer}
.grid{stroke:var(--rule);fill:none}text{font:12px system-ui,sans-serif;fill:var(--ink)}.inside{fill:#fff;font-size:11px}
.line{fill:none;stroke:var(--c);stroke-width:2;stroke-linejoin:round}.band{fill:var(--c);opacity:.16}
circle{fill:var(--c)}.leader{stroke:var(--pale);stroke-width:.8;fill:none}
.whisker{stroke:var(--c0);stroke-width:1.4;fill:none}
.name{paint-order:stroke;stroke:var(--paper);stroke-width:3px;stroke-linejoin:round}
.yardstick{--c:var(--pale);stroke-width:1.2;stroke-dasharray:2 3}
.c0{--c:var(--c0)}.c1{--c:var(--c1)}.c2{--c:var(--c2)}.c3{--c:var(--c3)}.c4{--c:var(--c4)}.c5{--c:var(--c5)}
.line.d1{stroke-dasharray:8 4}.line.d2{stroke-dasharray:2 3}.line.d3{stroke-dasharray:9 3 2 3}
.a-compute,.a-backward{fill:#0072b2}.a-forward{fill:#4c9bd6}.a-read{fill:#9a7400}.a-update{fill:#a3427a}
.a-encode{fill:#c04f00}.a-decode{fill:#00795a}.a-wait{fill:#73777d}.a-other{fill:#9a9a9a}
.a-s0{fill:#00795a}.a-s1{fill:#0072b2}.a-s2{fill:#6b5ca5}.a-s3{fill:#a3427a}.a-s4{fill:#c04f00}
"""

CLOSED = "default-src 'none'; style-src 'unsafe-inline'"
"""The browser itself refuses whatever this page might ask from a network."""


def page(runs: Sequence[Run], files: Sequence[RateFile | LossFile] = ()) -> str:
    """Write the page: runs, what was measured of codecs, and losses against bytes."""
    measured = [file for file in files if isinstance(file, RateFile)]
    tables = [file for file in files if isinstance(file, LossFile)]
    title = "Training report: " if runs else "Codecs: " if measured else "Convergence: "
    title += ", ".join([*(run.name for run in runs), *(file.name for file in files)])
    parts = [f"<h1>{escape(title)}</h1>", *(_told(runs) if runs else []), *rates(measured), *losses(tables)]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{CLOSED}">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
    )
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(parts) + "\n</body></html>\n"


def _told(runs: Sequence[Run]) -> list[str]:
    names = [run.name for run in runs]
    parts = [column_table(names, fact_table(runs), ""), _missing(runs)]
    parts += [*learning(runs), traffic(runs), times(runs), *staleness(runs), *timelines(runs)]
    return [*parts, _settings(runs, names)]


def _missing(runs: Sequence[Run]) -> str:
    """Say what the run folders do not tell."""
    items = [f"<li>{escape(f'{run.name}: {text}')}</li>" for run in runs for text in run.missing]
    return f"<section><h2>What is missing</h2><ul>{''.join(items)}</ul></section>" if items else ""


def _settings(runs: Sequence[Run], names: Sequence[str]) -> str:
    different = differences(runs)
    text = "All settings are the same; the run folders apart." if len(runs) > 1 and not different else ""
    parts = column_table(names, different, "setting") if different else ""
    for run in runs:
        if run.config_text:
            parts += f"<details><summary>{escape(run.name)}: all settings, each with its source</summary>"
            parts += f"<pre>{escape(run.config_text)}</pre></details>"
    return figure("Settings that differ" if len(runs) > 1 else "Settings", parts, text)

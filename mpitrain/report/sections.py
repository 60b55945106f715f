"""The sections of the page: which pictures are drawn of which runs, and what is said below them."""

import math
from collections.abc import Sequence
from html import escape

from mpitrain.report.chart import Bar, Line, bar_chart, lane_chart, legend, line_chart, swatches
from mpitrain.report.read import Event, RankTime, Run, number, printable, table
from mpitrain.report.series import (
    BYTE_UNITS,
    SECOND_UNITS,
    bucket_size,
    buckets,
    bytes_text,
    running_sum,
    seconds_text,
    thinned,
    unit,
)

MAX_RANKS = 24
"""Drawn of a run; with more of them, no picture fits a page."""

MAX_BANDS = 4
"""Runs up to which ranges are shaded; more would hide each other."""

Entry = tuple[int, Run]
"""A run and its number, which decides its colour in every chart."""


def figure(title: str, picture: str, note: str = "") -> str:
    """Put a picture under its title, and what must be known of it below."""
    caption = f"<p>{escape(note.strip())}</p>" if note else ""
    return f"<section><h2>{escape(title)}</h2>{picture}{caption}</section>"


def learning(runs: Sequence[Run]) -> list[str]:
    """Draw losses and metrics, apart for runs that are measured by different metrics."""
    groups: dict[str, list[Entry]] = {}
    for entry in enumerate(runs):
        groups.setdefault(entry[1].metric, []).append(entry)
    found = []
    for metric, group in groups.items():
        suffix = f" (runs measured by {metric or 'nothing'})" if len(groups) > 1 else ""
        found += [_training_loss(group, suffix), *_tests(group, suffix), _loss_over_bytes(group, suffix)]
    return found


def _training_loss(group: Sequence[Entry], suffix: str) -> str:
    """Draw the loss over steps, before the range of what was averaged into a point."""
    title, shaded = "Training loss" + suffix, len(group) <= MAX_BANDS
    lines = []
    for style, run in group:
        points = buckets(run.column("step"), run.column("loss"))
        band = [(point.x, point.low, point.high) for point in points] if shaded else []
        lines.append(Line(run.name, style, [(point.x, point.mean) for point in points], band))
    if not _drawable(lines):
        return figure(title, "", "No step with a finite loss.")
    note = averaging(max(len(run.rows) for _, run in group), "steps", shaded=shaded) + _not_finite(group)
    return figure(title, legend(lines) + line_chart(lines, "step", "training loss"), note)


def averaging(rows: int, what: str, *, shaded: bool = False) -> str:
    """Say what a point is, where it is more than one row."""
    size = bucket_size(rows)
    if size == 1:
        return ""
    return f"A point is the mean of up to {size} {what} in a row" + (
        "; the shade spans the smallest and the largest of them." if shaded else "."
    )


def _not_finite(group: Sequence[Entry]) -> str:
    lost = [(run.name, sum(map(math.isnan, run.column("loss")))) for _, run in group]
    return "".join(f" {name}: {count} steps without a finite loss are left out." for name, count in lost if count)


def _tests(group: Sequence[Entry], suffix: str) -> list[str]:
    """Draw everything that was measured on the test samples, a chart each."""
    keys = dict.fromkeys(key for _, run in group for row in run.rows for key in row if key.startswith("test_"))
    found = []
    for key in sorted(keys, key=lambda key: (key == "test_loss", key)):
        lines, most = [], 0
        for style, run in group:
            rows = [row for row in run.rows if not math.isnan(number(row, key))]
            points = buckets([number(row, "step") for row in rows], [number(row, key) for row in rows])
            lines.append(Line(run.name, style, [(point.x, point.mean) for point in points], dots=True))
            most = max(most, len(rows))
        name = printable(key).replace("_", " ", 1)
        if most:
            picture = legend(lines) + line_chart(lines, "step", name)
            found.append(figure(name.capitalize() + suffix, picture, averaging(most, "evaluations")))
    return found


def _loss_over_bytes(group: Sequence[Entry], suffix: str) -> str:
    """Draw what compression buys: how far the loss comes for as many bytes."""
    title = "Training loss over bytes of gradients" + suffix
    sums = {style: running_sum(run.gradient_bytes) for style, run in group}
    sending = [(style, run) for style, run in group if sums[style] and sums[style][-1] > 0]
    size, name = unit(max([sums[style][-1] for style, _ in sending] or [0.0]), BYTE_UNITS)
    lines = []
    for style, run in sending:
        points = buckets([value / size for value in sums[style]], run.column("loss"))
        lines.append(Line(run.name, style, [(point.x, point.mean) for point in points]))
    silent = [run.name for _, run in group if all(run is not other for _, other in sending)]
    note = f"Left out, for nothing was sent: {', '.join(silent)}." if silent else ""
    if not _drawable(lines):
        return figure(title, "", note or "No step with a finite loss.")
    note = "Further left is cheaper, lower is better. Points are means as above. " + note
    return figure(title, legend(lines) + line_chart(lines, f"{name} sent by rank 0", "training loss"), note)


def traffic(runs: Sequence[Run]) -> str:
    """Draw cumulated bytes beside what a float32 ring would have sent."""
    title = "Bytes of gradients sent, cumulated"
    sums = [running_sum(run.gradient_bytes) for run in runs]
    rings = dict.fromkeys(ring for run in runs if (ring := ring_bytes(run)))
    last = max((number(run.rows[-1], "step") for run in runs if run.rows), default=0.0)
    largest = max([values[-1] for values in sums if values] + [ring * last for ring in rings], default=0.0)
    if not largest:
        return figure(title, "", "Nothing was sent.")
    size, name = unit(largest, BYTE_UNITS)
    lines = []
    for style, (run, values) in enumerate(zip(runs, sums, strict=True)):
        points = thinned(list(zip(run.column("step"), [value / size for value in values], strict=True)))
        lines.append(Line(run.name, style, [(0.0, 0.0), *points]))
    for ring in rings:
        label = "float32 ring" + (f", {bytes_text(ring)} a step" if len(rings) > 1 else "")
        lines.append(Line(label, None, [(0.0, 0.0), (last, ring * last / size)]))
    note = (
        "Payload and headers that rank 0 handed to MPI; the float32 ring is a rank's share of what an uncompressed "
        "ring sends for the gradients, without headers."
    )
    if native := [run.name for run in runs if run.summary.get("collective") == "native"]:
        note += f" What MPI's own sum sends is not known; drawn is what it was given: {', '.join(native)}."
    if unknown := [run.name for run in runs if not run.summary]:
        note += f" Without a summary there is no float32 ring to compare with: {', '.join(unknown)}."
    return figure(title, legend(lines) + line_chart(lines, "step", f"{name} sent by rank 0", zero=True), note)


def ring_bytes(run: Run) -> float:
    """Return a training rank's share of what a float32 ring sends in a step; 0 where the summary does not tell."""
    total, ranks, steps = (number(run.summary, key) for key in ("fp32_ring_bytes_total", "ranks", "steps"))
    grid = table(run.summary, "grid")
    if (servers := number(grid, "servers")) > 0:
        ranks -= servers * number(grid, "pp") * number(grid, "tp")
    return total / ranks / steps if total > 0 and ranks > 0 and steps > 0 else 0.0


def times(runs: Sequence[Run]) -> str:
    """Draw where the time of every rank went."""
    bars, note = [], "Compute is all that is not encode, decode or wait."
    for run in runs:
        bars += [Bar(run.name)] if len(runs) > 1 and run.times else []
        # A rank that waits little is one that the others wait for.
        chosen = sorted(run.times, key=lambda time: time.seconds["wait"])[:MAX_RANKS]
        bars += [_time_bar(time) for time in sorted(chosen, key=lambda time: time.rank)]
        if len(chosen) < len(run.times):
            note += f" {run.name}: the {MAX_RANKS} of {len(run.times)} ranks that waited least."
    if not any(bar.parts for bar in bars):
        return figure("Where the time went", "", "No run tells.")
    return figure(
        "Where the time went",
        swatches(["compute", "encode", "decode", "wait"]) + bar_chart(bars, "Where the time went"),
        note,
    )


def _time_bar(time: RankTime) -> Bar:
    return Bar(rank_label(time.rank, time.host), time.seconds, seconds_text(sum(time.seconds.values())))


def rank_label(rank: int, host: str) -> str:
    """Name a rank and its host, short enough for the margin."""
    return f"rank {rank} {host if len(host) <= 12 else host[:11] + '…'}".strip()


COMMUNICATION = ("encode", "decode", "wait")


def timelines(runs: Sequence[Run]) -> list[str]:
    """Draw one step of every run that kept one: what each rank did when."""
    return [_timeline(run, len(runs) > 1) for run in runs if run.timeline]


def _timeline(run: Run, named: bool) -> str:
    shown = run.timeline[:MAX_RANKS]
    size, unit_name = unit(max(end for rank in shown for _, _, end in rank.events), SECOND_UNITS)
    lanes = []
    for rank in shown:
        events = [(name, start / size, end / size) for name, start, end in rank.events]
        lanes.append((rank_label(rank.rank, rank.host), [event for event in events if not _communicates(event)]))
        lanes.append(("exchange", [event for event in events if _communicates(event)]))
    step = "a step" if run.timeline_step is None else f"step {run.timeline_step}"
    title = f"Timeline of {step}" + (f": {run.name}" if named else "")
    note = "Two lanes a rank: the model above, the exchange below. A rank's clock starts with its step."
    if len(shown) < len(run.timeline):
        note += f" The first {MAX_RANKS} of {len(run.timeline)} ranks."
    names = dict.fromkeys(name for rank in shown for name, _, _ in rank.events)
    return figure(title, swatches(list(names)) + lane_chart(lanes, unit_name, title), note)


def _communicates(event: Event) -> bool:
    return event[0] in COMMUNICATION


def _drawable(lines: Sequence[Line]) -> bool:
    return any(not math.isnan(y) for line in lines for _, y in line.points)

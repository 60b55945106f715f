"""What is told of a run in words and numbers, on the page and in the terminal."""

import json
import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from mpitrain.report.read import Run, number, printable, table
from mpitrain.report.series import bytes_text, seconds_text
from mpitrain.train.runfolder import Row

UNKNOWN = "-"
STOPPED = {"target": "the target was reached", "patience": "no progress for as long as train.patience allows"}
REPLICAS = {"True": "yes, bit for bit", "False": "NO"}
AXES = ("dp", "pp", "tp")
ROWS = (*AXES, "servers")
TERMINAL_COLUMNS = 80


def facts(run: Run) -> dict[str, str]:
    """Sum up a run; what is not known is a dash."""
    summary, grid = run.summary, _grid(run)
    metric, skipped = table(summary, "metric"), [value for value in run.column("skipped") if not math.isnan(value)]
    sent, ring = number(summary, "sent_bytes_total"), number(summary, "fp32_ring_bytes_total")
    return {
        "started": _started(run),
        "ranks": _count(_ranks(run)),
        "grid": ", ".join(f"{axis} {_count(number(grid, axis))}" for axis in ROWS if grid.get(axis)) or UNKNOWN,
        "exchanged": _when(run),
        "collective": UNKNOWN if _serves(run) else _setting(run, "collective"),
        "travelled as": travelled(run),
        **_answers(run),
        "parameters": _count(number(summary, "num_parameters")),
        "steps": _steps(run),
        printable(str(metric.get("name", "test metric"))).replace("_", " ", 1): _decimal(number(metric, "value")),
        "test loss": _decimal(number(summary, "loss")),
        "bytes sent, all ranks": _bytes(sent),
        **_within_replicas(run),
        "float32 ring would send": _bytes(ring),
        "bytes vs float32 ring": saving(run),
        "samples/s after warm-up": _count(number(summary, "samples_per_s")),
        "wall time": _known(number(summary, "wall_s"), seconds_text),
        **_staleness(run),
        "skipped steps": _count(skipped[-1]) if skipped else UNKNOWN,
        "replicas identical": REPLICAS.get(str(summary.get("replicas_identical")), UNKNOWN),
    }


def _within_replicas(run: Run) -> dict[str, str]:
    """Tell what a split model sends for itself; nothing of one that always was whole on every rank."""
    grid, split = _grid(run), {}
    setting = {name: _setting(run, name, "parallel") for name in ("codec", "memory", "gradient_codec", "tensor_codec")}
    if number(grid, "pp") > 1:
        split["activations travelled as"] = _bytes_of(setting["codec"], setting["memory"])
        split["their gradients as"] = _bytes_of(setting["gradient_codec"])
    if number(grid, "tp") > 1:
        split["sums of layers travelled as"] = _bytes_of(setting["tensor_codec"])
    inside = number(run.summary, "replica_bytes_total")
    return {"of these within replicas": _bytes(inside), **split} if split or inside > 0 else {}


def _when(run: Run) -> str:
    """Tell when gradients, or changes of weights, left the ranks that trained."""
    when = _setting(run, "when")
    if when == "local":
        return f"every {_count(number(run.settings, 'exchange.h'))} steps"
    if when != "server":
        return {"sync": "every step"}.get(when, when)
    mode, bound = _setting(run, "mode"), number(run.settings, "exchange.staleness")
    return f"with servers, {mode}" + (f" of up to {_count(bound)}" if mode == "ssp" else "")


def _exchanged(run: Run) -> str:
    """Tell in a word or two when and as what things travelled."""
    when = _setting(run, "when")
    if when == "local":
        return f"{travelled(run)} / {_count(number(run.settings, 'exchange.h'))} steps"
    if when != "server":
        return travelled(run)
    mode, bound = _setting(run, "mode"), number(run.settings, "exchange.staleness")
    return f"{travelled(run)}, {mode}" + (f" {_count(bound)}" if mode == "ssp" else "")


def _serves(run: Run) -> bool:
    """Tell whether servers held the weights, so that nothing was summed by a collective."""
    return _setting(run, "when") == "server"


def _answers(run: Run) -> dict[str, str]:
    codec = _setting(run, "server_codec")
    return {"weights travelled as": _bytes_of(codec, "none" if codec == "raw" else "delta")} if _serves(run) else {}


def _staleness(run: Run) -> dict[str, str]:
    told = table(run.summary, "staleness")
    mean, most = number(told, "mean"), number(told, "max")
    return {} if math.isnan(mean) or math.isnan(most) else {"staleness, mean and most": f"{mean:.2f}, {_count(most)}"}


def fact_table(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Return a list of texts, one a run, for every label that some run has."""
    each = [facts(run) for run in runs]
    labels = dict.fromkeys(label for one in each for label in one)
    return {label: [one.get(label, UNKNOWN) for one in each] for label in labels}


def travelled(run: Run) -> str:
    """Name the bytes that a gradient travelled as."""
    return _bytes_of(_setting(run, "codec"), _setting(run, "memory"))


def _bytes_of(codec: str, memory: str = UNKNOWN) -> str:
    name = {"raw": "raw float32"}.get(codec, codec)
    return name if memory in ("none", UNKNOWN) else f"{name}+{memory}"


def saving(run: Run) -> str:
    """Tell how many times fewer bytes were sent than a float32 ring sends."""
    ratio = number(run.summary, "ratio")
    if not ratio > 0:
        return UNKNOWN
    if 0.98 < ratio < 1.02:
        return "as many"
    return f"{ratio:.1f}x fewer" if ratio > 1 else f"{1 / ratio:.1f}x more"


def differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Return the settings in which runs differ; their folders always do, and are left out."""
    keys = dict.fromkeys(key for run in runs for key in run.settings if key != "run.folder")
    values = {key: [_value(run.settings[key]) if key in run.settings else UNKNOWN for run in runs] for key in keys}
    return {key: texts for key, texts in values.items() if len(set(texts)) > 1}


def _value(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def terminal_table(runs: Sequence[Run]) -> str:
    """Lay out what a newcomer asks first, in 80 columns: result, bytes, time."""
    names = {run.metric for run in runs}
    same = len(names) == 1
    head = ["run", "travelled as", f"test {names.pop()}".strip() if same else "test", "bytes sent", "vs float32"]
    rows = [[*head, "time"]]
    for run in runs:
        result = _decimal(number(table(run.summary, "metric"), "value"))
        sent, wall = number(run.summary, "sent_bytes_total"), number(run.summary, "wall_s")
        told = result if same else f"{run.metric} {result}"
        time = _known(wall, seconds_text) if run.summary else "unfinished"
        rows.append([run.name, _exchanged(run), told, _known(sent, bytes_text), saving(run), time])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[0] = max(8, min(widths[0], TERMINAL_COLUMNS - sum(widths[1:]) - 2 * len(widths[1:])))
    return "\n".join(_line(row, widths) for row in rows)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    """Align words left and numbers right; of a long name the end tells most."""
    name = row[0] if len(row[0]) <= widths[0] else "…" + row[0][1 - widths[0] :]
    left = [f"{name:<{widths[0]}}", f"{row[1]:<{widths[1]}}"]
    return "  ".join(left + [f"{text:>{width}}" for text, width in zip(row[2:], widths[2:], strict=True)])


def _setting(run: Run, key: str, section: str = "exchange") -> str:
    """Return a choice: of the exchange of gradients, as the summary has it, or of another section."""
    value = (run.summary.get(key) if section == "exchange" else None) or run.settings.get(f"{section}.{key}")
    return printable(value) if isinstance(value, str) else UNKNOWN


def _ranks(run: Run) -> float:
    ranks = number(run.summary, "ranks")
    return math.prod(number(_grid(run), axis) for axis in AXES) if math.isnan(ranks) else ranks


def _grid(run: Run) -> Row:
    """Return the ranks of every axis: as the summary has them, or the settings of a run that has none."""
    return table(run.summary, "grid") or {axis: run.settings.get(f"parallel.{axis}") for axis in AXES}


def _steps(run: Run) -> str:
    """Tell how far the run came, and of how many steps."""
    taken = number(run.rows[-1], "step") if run.rows else number(run.summary, "steps")
    planned = number(run.settings, "train.steps")
    text = _count(taken) + (f" of {_count(planned)}" if taken < planned else "")
    reason = run.summary.get("stopped")
    return text + (f": {STOPPED.get(reason, printable(reason))}" if isinstance(reason, str) else "")


def _started(run: Run) -> str:
    moment = number(run.rows[0], "time_s") if run.rows else math.nan
    try:
        return f"{datetime.fromtimestamp(moment, UTC):%Y-%m-%d %H:%M} UTC"
    except (ValueError, OverflowError, OSError):  # NaN, or no time at all
        return UNKNOWN


def _known(value: float, write: Callable[[float], str]) -> str:
    return UNKNOWN if math.isnan(value) else write(value)


def _count(value: float) -> str:
    return UNKNOWN if math.isnan(value) else f"{value:,.0f}"


def _decimal(value: float) -> str:
    return UNKNOWN if math.isnan(value) else f"{value:.4f}"


def _bytes(value: float) -> str:
    if math.isnan(value):
        return UNKNOWN
    return bytes_text(value) + (f" ({value:,.0f})" if value >= 1000 else "")

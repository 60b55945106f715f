"""Codecs beside Shannon's bound: records of ``mpitrain bench codec --json FILE``, a picture and a table a source."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpitrain.report.chart import Line, Mark, point_chart
from mpitrain.report.read import number, printable
from mpitrain.report.records import wrong_records
from mpitrain.report.sections import figure
from mpitrain.report.tables import column_table
from mpitrain.train.runfolder import Row

UNKNOWN = "-"
BOUNDS = {
    "gaussian": ("Shannon's bound", "The dashed line is Shannon's bound of a Gaussian source."),
    "laplace": ("Shannon's lower bound", "The dashed line is Shannon's lower bound of a Laplacian source."),
}
"""What the line is called, and what is said of it."""

CAPTURED = (
    "Gaussian tensors",
    "The dashed line is the bound of independent Gaussian values with the scales of the tensors. Captured values need "
    "at most as much; what they truly need is not known, and a codec may come to lie above the line.",
)


@dataclass(frozen=True)
class Measured:
    """What a codec needs and loses; NaN where it was not measured.

    Attributes
    ----------
    bits : float
        Of a value on the wire.
    snr_db : float
    gap_bits : float
        Distance of ``bits`` from the bound at the same error.
    """

    codec: str
    bits: float
    snr_db: float
    gap_bits: float


@dataclass(frozen=True)
class RateFile:
    """A file of records: what was measured, by source."""

    name: str
    sources: dict[str, list[Measured]]


def read_rates(path: Path, records: Sequence[object]) -> RateFile:
    """Sort the records of a file.

    Raises
    ------
    ConfigError
        One is of another kind, or there twice.
    """
    sources: dict[str, list[Measured]] = {}
    for index, record in enumerate(records):
        source, measured = _measured(path, index, record)
        group = sources.setdefault(source, [])
        if any(measured.codec == other.codec for other in group):
            raise wrong_records(path, f"{measured.codec} of {source} twice")
        group.append(measured)
    return RateFile(printable(path.name), sources)


def _measured(path: Path, index: int, record: object) -> tuple[str, Measured]:
    row: Row = record if isinstance(record, dict) else {}
    codec, source, bits = row.get("codec"), row.get("source"), number(row, "bits_per_value")
    if not isinstance(codec, str) or not isinstance(source, str) or not bits > 0:
        raise wrong_records(path, f"a record (number {index + 1}) without codec, source and bits_per_value")
    return printable(source), Measured(printable(codec), bits, number(row, "snr_db"), number(row, "shannon_gap_bits"))


def rates(files: Sequence[RateFile]) -> list[str]:
    """Draw every source of every file."""
    return [
        _section(source, measured, f" ({file.name})" if len(files) > 1 else "")
        for file in files
        for source, measured in file.sources.items()
    ]


def bound(measured: Sequence[Measured], source: str = "") -> list[tuple[float, float]]:
    """Return (bits, dB) of the bound, from nothing on, which errs by the values themselves.

    Of a Gaussian source it is the formula ½·log2(SNR), a straight line over dB; of others it goes from codec to codec.
    """
    if source == "gaussian":
        most = max(0.0, *(each.snr_db for each in measured), 0.0)
        return [(0.0, 0.0), (most * math.log2(10) / 20, most)]
    known = {each.snr_db: max(0.0, each.bits - each.gap_bits) for each in measured if not math.isnan(each.gap_bits)}
    return [(0.0, 0.0), *((known[snr_db], snr_db) for snr_db in sorted(known) if snr_db > 0)]


def _section(source: str, measured: Sequence[Measured], suffix: str) -> str:
    title = f"Rate and distortion of codecs: {source}{suffix}"
    name, note = BOUNDS.get(source, CAPTURED)
    drawn = [each for each in measured if not math.isnan(each.snr_db)]
    silent = [each.codec for each in measured if math.isnan(each.snr_db)]
    table = column_table(
        ["bits a value", "SNR, dB", "bits above the bound"],
        {each.codec: [_decimal(each.bits), _decimal(each.snr_db), _decimal(each.gap_bits)] for each in measured},
        "codec",
    )
    left_out = f" Without a point, for nothing is lost or a memory makes good for it: {', '.join(silent)}."
    if not drawn:
        return figure(title, table, left_out)
    marks = [Mark(each.codec, each.bits, each.snr_db) for each in drawn]
    lines = [Line(name, None, bound(drawn, source))]
    picture, unnamed = point_chart(marks, lines, "bits a value", "SNR, dB")
    note = "Further left is cheaper, higher is closer to the values. " + note + (left_out if silent else "")
    if unnamed:
        note += f" Too close to others to be named in the picture: {', '.join(unnamed)}."
    return figure(title, picture + table, note)


def _decimal(value: float) -> str:
    return UNKNOWN if math.isnan(value) else f"{value:.3f}"

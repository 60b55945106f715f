"""What a run says of itself: at the start, at every step, and at the end."""

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version

import mpitrain
from mpitrain.collectives.base import Event
from mpitrain.comm.runtime import library_name
from mpitrain.config.schema import ExchangeConfig
from mpitrain.errors import count
from mpitrain.kernels.jit import cache_folder
from mpitrain.partition import split_sizes
from mpitrain.train.build import Parts
from mpitrain.train.evaluate import Score
from mpitrain.train.runfolder import Row

MB = 1e6

SAME = 1.05
"""Ratio up to which two numbers of bytes are called the same: headers weigh that much in small messages."""

EFFECTIVE = 0.05
"""Share of the exchange that must be hidden behind computation for overlap to be called effective."""

WARM_UP_STEPS = 5
"""First steps of a start that throughput leaves out: caches fill, connections open."""


@dataclass
class Throughput:
    """Samples and seconds of the steps of this start, without warm-up, evaluation and saves."""

    steps: int = 0
    samples: int = 0
    seconds: float = 0.0

    @property
    def warm(self) -> bool:
        """Whether the warm-up is over."""
        return self.steps > WARM_UP_STEPS

    @property
    def samples_per_s(self) -> float | None:
        """Samples of all ranks a second; None where no step came after the warm-up."""
        return self.samples / self.seconds if self.seconds else None

    def add(self, rows: Sequence[Row]) -> None:
        """Count the steps of a round."""
        for row in rows:
            self.steps += 1
            if self.warm:
                self.samples += int(str(row["samples"]))
                self.seconds += float(str(row["step_s"]))


def timeline(events: Sequence[Event]) -> dict[str, object]:
    """Describe this rank's step for timeline.json: its host, and events with seconds since the first one began."""
    start = min((begin for _, begin, _ in events), default=0.0)
    shown = [[what, round(begin - start, 6), round(end - start, 6)] for what, begin, end in events]
    return {"host": os.uname().nodename, "events": sorted(shown, key=lambda event: float(str(event[1])))}


def describe(parts: Parts) -> list[str]:
    """Tell what is about to run."""
    config, exchange = parts.config, parts.exchange
    codecs = [f"{codec} for {count(len(names), 'tensor')}" for codec, names in exchange.tensors_by_codec().items()]
    data, optim = parts.dataset, config.optim
    lines = [
        f"mpitrain  {mpitrain.__version__}, {library_name()}, {_ranks(parts)}",
        f"model     {config.model.kind}, {parts.num_parameters:,} parameters in {len(parts.part.sizes)} tensors",
        f"data      {config.data.kind}: {sum(data.train_group_sizes):,} training samples of "
        f"{count(len(data.group_names), 'group')}, {data.num_test:,} test samples, {config.data.placement} placement",
        f"train     {config.train.steps} steps, batches of {_batch(parts)}, {_micro_batches(parts)}",
        *_split(parts),
        f"optim     {optim.kind}, lr {optim.lr:g}, {optim.schedule} after {optim.warmup_steps} steps of warm-up",
        f"exchange  {_when(config.exchange)}, {', '.join(codecs)}; "
        f"memory {config.exchange.memory}, {count(len(exchange.sizes()), 'bucket')}{_where(parts)}",
        f"run       {config.run.folder}",
    ]
    wanted = os.environ.get("OMP_NUM_THREADS") or os.environ.get("OPENBLAS_NUM_THREADS") or ""
    threads = count(int(wanted), "BLAS thread") if wanted.isdecimal() else "all BLAS threads"
    kernels = f"kept in {cache_folder}" if cache_folder else "compiled anew at every start: no folder can be written"
    return [*lines, f"machine   {threads} a rank, kernels {kernels}"]


def _ranks(parts: Parts) -> str:
    """Count the ranks, and tell which of them serve."""
    shape = parts.grid.shape
    served = f": {shape.workers} that train, {shape.size - shape.workers} that serve" if shape.servers else ""
    return count(shape.size, "rank") + served


def _when(exchange: ExchangeConfig) -> str:
    """Tell when gradients, or changes of weights, leave, and how."""
    served = count(exchange.servers or 0, "server")
    if exchange.when == "server":
        bound = f" with a staleness of up to {exchange.staleness}" if exchange.mode == "ssp" else ""
        return f"server, {exchange.mode}{bound}, {served} answering with {exchange.server_codec}; gradients"
    how = f"through {served}" if exchange.collective == "server" else exchange.collective
    if exchange.when == "local":
        parts = f" in {exchange.fragments} parts" if exchange.fragments > 1 else ""
        return f"local, changes of {count(exchange.h, 'step')}{parts}, {how}"
    ends = {"first": exchange.warmup_steps, "last": exchange.raw_last_steps}
    raw = [f"the {end} {count(steps, 'step')} raw" for end, steps in ends.items() if steps]
    return ", ".join([exchange.when, how, *raw])


def _where(parts: Parts) -> str:
    """Tell whose part of the model was counted, if there are several."""
    return " (rank 0's part)" if parts.grid.replica.size > 1 else ""


def _micro_batches(parts: Parts) -> str:
    number = parts.pipeline.settings.micro_batches
    return "nothing accumulated" if number == 1 else f"up to {number} micro-batches a rank"


def _split(parts: Parts) -> list[str]:
    """Tell how the model is split, if it is."""
    shape, parallel = parts.grid.shape, parts.config.parallel
    if shape.pp * shape.tp == 1:
        return []
    words = [str(shape)]
    if shape.pp > 1:
        starts = ", ".join(map(str, [0, *parts.part.cuts]))
        words.append(f"{parallel.schedule}, stages begin at units {starts}")
        memory = f" with memory {parallel.memory}" if parallel.memory != "none" else ""
        words.append(f"activations {parallel.codec}{memory}, their gradients {parallel.gradient_codec}")
    if shape.tp > 1:
        norms = "norms by time steps, " if parallel.sequence else ""
        words.append(f"{norms}sums of the tensor axis {parallel.tensor_codec}")
    return [f"split     {'; '.join(words)}"]


def _batch(parts: Parts) -> str:
    """Tell the batch of all ranks, and what a rank has of it."""
    size, ranks = parts.config.train.batch_size, parts.grid.shape.dp
    if parts.config.data.placement == "station":
        return f"{size} samples over all ranks, in proportion to their stations"
    shares = sorted(set(split_sizes(size, ranks)), reverse=True)
    return f"{size} samples over all ranks, {' or '.join(map(str, shares))} a rank"


def progress_line(parts: Parts, rows: Sequence[Row], result: Score | None) -> str:
    """Sum up a round for a person: the loss of its last step, and what its steps took together."""

    def total(key: str) -> float:
        return sum(float(str(row[key])) for row in rows)

    seconds, inside = total("step_s"), total("replica_bytes")
    sent, baseline = total("sent_bytes") - inside, parts.fp32_ring_bytes * len(rows)
    share = {name: total(f"{name}_s") / seconds for name in ("compute", "encode", "decode", "wait")}
    text = f"loss {rows[-1]['loss']:.4f}  {total('samples') / seconds:,.0f} samples/s"
    exchange = parts.config.exchange
    steps = f" in {len(rows)} steps" if len(rows) > 1 else ""
    if exchange.when == "server":  # half of what it costs is sent by the servers
        text += f"  sent {sent / MB:.3f} MB{steps}"
    elif baseline and exchange.collective != "native":
        ratio = baseline / max(sent, 1)
        less = f"{ratio:.1f}x less than" if ratio > SAME else "as much as"
        text += f"  sent {sent / MB:.3f} MB{steps} ({less} float32)"
    if inside:
        text += f"  within the replica {inside / MB:.3f} MB"
    text += "  " + " ".join(f"{name} {value:.0%}" for name, value in share.items())
    hidden = hidden_share(exchange, rows)
    text += "" if hidden is None else f"  hidden {hidden:.0%}"
    return text + (f"  test {result.name} {result.metric:.4f}" if result else "")


def hidden_share(exchange: ExchangeConfig, rows: Sequence[Row]) -> float | None:
    """Return what was received before there was nothing to do but wait, as a share; None where nothing overlaps.

    Parameters
    ----------
    rows : list of dict
        With ``hidden_bytes`` and ``exposed_bytes``: of steps, or of ranks.
    """
    overlaps = exchange.overlap if exchange.when == "sync" else exchange.when == "local" and exchange.delay > 0
    hidden, exposed = (sum(int(str(row[f"{name}_bytes"])) for row in rows) for name in ("hidden", "exposed"))
    return hidden / (hidden + exposed) if overlaps and hidden + exposed else None


def overlap_note(share: float | None) -> list[str]:
    """Say so where overlap is not effective."""
    if share is None or share >= EFFECTIVE:
        return []
    return [
        f"overlap   is not effective: {share:.1%} of what the exchange received had come when backward was done; a "
        "coarser codec or local steps would shorten the rest"
    ]


def summarize(parts: Parts, result: Score, *, steps: int, per_rank: list[dict[str, object]]) -> Row:
    """Collect what summary.json holds beside the seconds of this start.

    ``sent_bytes_total`` are payload and headers that all ranks handed to MPI over the whole run, and
    ``replica_bytes_total`` those of them that stayed within replicas: activations, their gradients, sums of layers. The
    rest are gradients on the data axis; the baseline is what an uncompressed float32 ring would have sent for them, in
    as many steps, without headers.
    """
    exchange = parts.config.exchange
    sent_bytes = sum(int(str(totals["sent_bytes"])) for totals in per_rank)
    inside_bytes = sum(int(str(totals["replica_bytes"])) for totals in per_rank)
    gradient_bytes = sent_bytes - inside_bytes
    baseline = round(sum(float(str(totals["fp32_ring_bytes"])) for totals in per_rank))
    collective = None if exchange.when == "server" else exchange.collective
    return {
        "metric": {"name": f"test_{result.name}", "value": result.metric},
        "loss": result.loss,
        "steps": steps,
        "ranks": parts.grid.world.size,
        "grid": _grid(parts),
        "when": exchange.when,
        "mode": exchange.mode if exchange.when == "server" else None,
        "collective": collective,
        "codec": exchange.codec,
        "memory": exchange.memory,
        "sent_bytes_total": sent_bytes,
        "replica_bytes_total": inside_bytes,
        "fp32_ring_bytes_total": baseline,
        # What MPI's own sum sends is its affair: a ratio would compare unlike things.
        "ratio": baseline / gradient_bytes if baseline and gradient_bytes and collective != "native" else None,
        "hidden_share": hidden_share(exchange, per_rank),
        "num_parameters": parts.num_parameters,
        "per_rank": per_rank,
        "versions": {
            "mpitrain": mpitrain.__version__,
            "mpi": library_name(),
            **{name: version(name) for name in ("mpi4py", "numpy", "numba", "h5py")},
            "python": platform.python_version(),
        },
    }


def _grid(parts: Parts) -> dict[str, int]:
    """Name the axes, and the rows that serve if there are any."""
    shape = parts.grid.shape
    return {"dp": shape.dp, "pp": shape.pp, "tp": shape.tp} | ({"servers": shape.servers} if shape.servers else {})

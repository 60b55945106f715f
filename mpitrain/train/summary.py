"""What a run says of itself: at the start, at every step, and at the end."""

import os
import platform
from importlib.metadata import version

import mpitrain
from mpitrain.comm.runtime import library_name
from mpitrain.kernels.jit import cache_folder
from mpitrain.train.build import Parts
from mpitrain.train.evaluate import Score
from mpitrain.train.exchange import float32_ring_bytes
from mpitrain.train.runfolder import Row

MB = 1e6


def describe(parts: Parts) -> list[str]:
    """Tell what is about to run."""
    config, layout, exchange = parts.config, parts.params.layout, parts.exchange
    codecs = [f"{codec} for {len(names)} tensors" for codec, names in exchange.tensors_by_codec().items()]
    data = parts.dataset
    lines = [
        f"mpitrain  {mpitrain.__version__}, {library_name()}, {parts.grid.world.size} ranks",
        f"model     {config.model.kind}, {layout.num_parameters:,} parameters in {len(layout.specs)} tensors",
        f"data      {config.data.kind}: {sum(data.train_group_sizes):,} training samples of "
        f"{len(data.group_names)} groups, {data.num_test:,} test samples, {config.data.placement} placement",
        f"exchange  {config.exchange.when}, {config.exchange.collective}, {', '.join(codecs)}; "
        f"memory {config.exchange.memory}, {len(exchange.sizes())} buckets",
        f"run       {config.run.folder}",
    ]
    threads = os.environ.get("OMP_NUM_THREADS") or os.environ.get("OPENBLAS_NUM_THREADS") or "all"
    kernels = f"kept in {cache_folder}" if cache_folder else "compiled anew at every start: no folder can be written"
    return [*lines, f"machine   {threads} BLAS threads a rank, kernels {kernels}"]


def progress_line(parts: Parts, row: Row, result: Score | None) -> str:
    """Sum up a step for a person."""
    seconds = float(str(row["step_s"]))
    sent, baseline = (
        int(str(row["sent_bytes"])),
        float32_ring_bytes(parts.params.layout.num_parameters, parts.grid.data.size),
    )
    share = {name: float(str(row[f"{name}_s"])) / seconds for name in ("compute", "encode", "decode", "wait")}
    text = f"loss {row['loss']:.4f}  {float(str(row['samples'])) / seconds:,.0f} samples/s"
    if baseline and parts.config.exchange.collective != "native":
        text += f"  sent {sent / MB:.3f} MB ({baseline / parts.grid.data.size / max(sent, 1):.1f}x less than float32)"
    text += "  " + " ".join(f"{name} {value:.0%}" for name, value in share.items())
    return text + (f"  test {result.name} {result.metric:.4f}" if result else "")


def summarize(
    parts: Parts, result: Score, *, wall_s: float, steps_timed: int, sent_bytes: int, sha256: str, identical: bool
) -> Row:
    """Collect what summary.json holds.

    ``sent_bytes`` are payload and headers that all ranks handed to MPI for gradients over the whole run; the baseline
    is what an uncompressed float32 ring would have sent in as many steps, without headers.
    """
    config = parts.config
    baseline = float32_ring_bytes(parts.params.layout.num_parameters, parts.grid.data.size) * config.train.steps
    return {
        "metric": {"name": f"test_{result.name}", "value": result.metric},
        "loss": result.loss,
        "steps": config.train.steps,
        "wall_s": wall_s,
        "steps_timed": steps_timed,
        "ranks": parts.grid.world.size,
        "grid": {"dp": parts.grid.shape.dp, "pp": parts.grid.shape.pp, "tp": parts.grid.shape.tp},
        "collective": config.exchange.collective,
        "codec": config.exchange.codec,
        "memory": config.exchange.memory,
        "sent_bytes_total": sent_bytes,
        "fp32_ring_bytes_total": baseline,
        # What MPI's own sum sends is its affair: a ratio would compare unlike things.
        "ratio": baseline / sent_bytes if sent_bytes and config.exchange.collective != "native" else None,
        "num_parameters": parts.params.layout.num_parameters,
        "param_sha256": sha256,
        "replicas_identical": identical,
        "versions": {
            "mpitrain": mpitrain.__version__,
            "mpi": library_name(),
            **{name: version(name) for name in ("mpi4py", "numpy", "numba", "h5py")},
            "python": platform.python_version(),
        },
    }

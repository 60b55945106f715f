"""The configuration: one frozen structure a section, with types, bounds and defaults in one place."""

import sys
from typing import Annotated, Literal

from msgspec import Meta, Struct

from mpitrain.config.codec_names import TENSOR_KINDS, bounds, forms

Count = Annotated[int, Meta(ge=1)]
Index = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0, le=sys.float_info.max)]
NonNegative = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
Fraction = Annotated[float, Meta(ge=0, lt=1)]

Task = Literal["classify", "forecast", "lm"]
CodecName = Annotated[str, Meta(description=", ".join(f'`"{form}"`' for form in forms()) + f"; {bounds()}")]
"""Checked by `mpitrain.config.codec_names.parse_codec` when a configuration is read."""
TensorCodecName = Annotated[
    str,
    Meta(description=", ".join(f'`"{form}"`' for form in forms(TENSOR_KINDS)) + f"; {bounds(TENSOR_KINDS)}"),
]
"""Checked by `mpitrain.config.codec_names.parse_tensor_codec` when a configuration is read."""
MemoryName = Literal["none", "residual", "delta"]
CollectiveName = Literal["native", "ring", "direct", "server"]


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the configuration file."""


class ModelConfig(Section, frozen=True, kw_only=True):
    """[model]: what is trained."""

    kind: Literal["transformer", "mlp"] = "transformer"
    """transformer: attention over the time steps of a window; mlp: dense layers over the flattened window."""
    task: Task = "classify"
    """classify: one of several classes for a window; forecast: the values that follow it; lm: the next token."""
    d_model: Count = 64
    """Width of the vector that stands for a time step."""
    layers: Count = 2
    """Blocks of attention and feed-forward network, one after the other."""
    heads: Count = 4
    """Attention heads of a block; must divide ``d_model``."""
    d_ff: Count | None = None
    """Width of the hidden layer of a block; 4 d_model where left out."""
    hidden: tuple[Count, ...] = (128, 128)
    """Widths of the hidden layers of an MLP."""
    causal: bool = False
    """Whether a time step attends only to itself and the past."""
    dropout: Fraction = 0.0
    """Share of activations that is set to zero while training."""
    label_smoothing: Fraction = 0.0
    """Share of the target that is spread evenly over all classes."""
    tied: bool = False
    """Whether the output map of task = "lm" is the token embedding itself."""


class DataConfig(Section, frozen=True, kw_only=True):
    """[data]: what it is trained on."""

    kind: Literal["stations", "windows", "text"] = "stations"
    """stations: synthetic base stations, embedded; windows: cut from the rows of a file of yours; text: characters."""
    placement: Literal["station", "shuffled"] = "station"
    """station: every rank reads its own stations; shuffled: one global permutation an epoch, sliced by rank."""
    readers: Index = 1
    """Threads that gather the next batches while a step is computed; 0: the loop gathers them. Same bits."""
    window: Count = 16
    """Time steps of a sample: rows of a table, characters of a text."""
    stride: Count | None = None
    """Rows between the starts of two windows; as many as ``window`` where left out."""
    horizon: Count = 4
    """Forecast: rows that follow the window and are to be predicted."""

    stations: Count = 8
    """Stations to synthesize (kind = "stations"), at least as many as ranks where placement = "station"; sections into
    which a text is cut."""
    samples: Count = 6000
    """Training windows of all stations together (kind = "stations")."""
    test_samples: Count = 2000
    """Test windows of all stations together."""
    skew: NonNegative = 1.0
    """0: equal stations; 1: sizes and class mixes as unequal as those of real cells."""

    path: str = ""
    """File of kind "windows": .npz, .h5, .hdf5 (arrays by their path in the file) or .csv (a header row). Of kind
    "text": UTF-8; where left out, the topics of Python's own help."""
    test_fraction: Annotated[float, Meta(gt=0, lt=1)] = 0.1
    """Share of a text, at its end, that is the test part."""
    x: str = "x"
    """A matrix [rows, columns], whose columns the array ``columns`` may name; or arrays, separated by commas."""
    y: str = "y"
    """Array with the label of each row (0, 1, … or a text), or with the values to be forecast."""
    group: str = ""
    """Array that names the trace or session of each row; windows never cross it."""
    station: str = ""
    """Array that names the station of each row; a window belongs to that of its first row. Left out: the group."""
    test_groups: tuple[int | str, ...] = ()
    """Groups that are used for testing and not for training."""
    skip_groups: tuple[int | str, ...] = ()
    """Groups that are used neither for training nor for testing."""
    flags: tuple[str, ...] = ()
    """Comparisons such as "mode == 7" (== != < <= > >=): the column becomes 1 or 0, and is named by the comparison."""
    drop: tuple[str, ...] = ()
    """Columns of ``x`` that the model does not see."""
    active: tuple[str, ...] = ()
    """A window counts where one of these columns is above zero in one of its rows; empty: every window counts."""
    log1p: tuple[str, ...] = ()
    """Columns, the values of a forecast among them, replaced by sign(v) ln(1 + abs(v)); "*" for all."""
    missing: Literal["refuse", "zero"] = "refuse"
    """What becomes of NaN (a blank) in ``x``: zero puts 0 in its place before any transform, which suits rates and
    counts, not a power in dBm. Infinities are always refused."""
    standardize: bool = True
    """Shift and scale every column by its mean and standard deviation over the training windows."""
    clip: NonNegative = 0.0
    """Bound of standardized values, for columns with rare extremes; 0: none."""


class TrainConfig(Section, frozen=True, kw_only=True):
    """[train]: how long, and with what batches."""

    steps: Count = 300
    """Optimizer steps; a resumed run goes on to this step."""
    batch_size: Count = 64
    """Samples of a step over all ranks together."""
    seed: Index = 0
    """Of weights, sample order, dropout and stochastic rounding; the same seed repeats a run bit for bit."""
    eval_every: Index = 100
    """Steps between evaluations on the test samples; 0: only at the end. Where servers hold the weights, all workers
    meet there, as they do for checkpoints."""
    clip_norm: NonNegative = 1.0
    """Bound of the global gradient norm; 0: no clipping."""
    class_weights: Literal["equal", "balanced"] = "equal"
    """balanced: every class counts as much as the others in the training loss, however many samples it has."""
    max_skips: Count = 10
    """Steps in a row that may be skipped for non-finite gradients before the run counts as diverged."""
    target: NonNegative | None = None
    """Test metric at which the run ends, at the next evaluation: an accuracy to be reached, an error to be undercut."""
    init: str = ""
    """Run folder whose newest checkpoint gives the first weights, for fine-tuning; empty: drawn from ``seed``."""
    patience: Count | None = None
    """Evaluations in a row without a new lowest test loss after which the run ends."""
    diverge: NonNegative = 10.0
    """Multiple of the training loss at the start at which the median of the last 20 steps counts as diverged; 0:
    never."""


class OptimConfig(Section, frozen=True, kw_only=True):
    """[optim]: the optimizer and its learning rate."""

    kind: Literal["adamw", "sgd"] = "adamw"
    """adamw: Adam with decoupled weight decay; sgd: stochastic gradient descent with momentum."""
    lr: Positive = 1e-3
    """Learning rate at its highest, after warm-up."""
    schedule: Literal["constant", "cosine", "linear"] = "cosine"
    """How the rate falls from the end of the warm-up to the last step."""
    warmup_steps: Index = 0
    """Steps over which the rate rises linearly to ``lr``."""
    min_lr_ratio: Fraction = 0.0
    """Where the fall ends, as a share of ``lr``."""
    weight_decay: NonNegative = 0.01
    """Share of a weight that is taken off per step, times the rate; biases and gains are spared."""
    beta1: Fraction = 0.9
    """Decay of the running mean of gradients."""
    beta2: Fraction = 0.999
    """Decay of the running mean of squared gradients."""
    eps: Positive = 1e-8
    """Added to the root of the mean square before dividing by it."""
    momentum: Fraction = 0.9
    """Decay of the running sum of gradients; 0: none."""
    nesterov: bool = False
    """Look ahead along the momentum (Nesterov 1983)."""
    lr_scale: Literal["none", "sqrt", "linear"] = "linear"
    """What the rate is divided by where every worker's gradient is an update of its own (exchange.mode = "async").
    linear: the number of workers; sqrt: its root; none: 1."""


class ParallelConfig(Section, frozen=True, kw_only=True):
    """[parallel]: the process grid, and what crosses the cuts of a model that is split."""

    dp: Count | None = None
    """Ranks of the data axis: each sees a part of every batch. What the ranks allow where left out."""
    pp: Count = 1
    """Stages of the pipeline: each holds some of the layers."""
    tp: Count = 1
    """Ranks of the tensor axis: each holds a part of every layer. For fast links only: two sums a half-block."""
    micro_batches: Count | None = None
    """Parts into which a rank's share of a batch is cut, one after the other through the stages; their gradients add
    up. Left out: 4 pp, or 1 where pp = 1."""
    schedule: Literal["1f1b", "afab", "interleaved"] = "1f1b"
    """1f1b: one forward, one backward, so that a stage keeps at most pp micro-batches; afab: all forward, then all
    backward; interleaved: 1f1b with ``chunks`` pieces of the model a stage, for a smaller bubble and more messages."""
    chunks: Count | None = None
    """Pieces of the model that a stage holds (schedule = "interleaved"); 2 where left out."""
    cuts: tuple[Count, ...] = ()
    """Where the stages begin, as numbers of units (`mpitrain plan` lists them); left out: chosen by cost and bytes."""
    sequence: bool = False
    """Whether the tensor axis also splits norms and dropout, over time steps: less memory, the same bytes."""
    recompute: bool = False
    """Whether a block keeps only its input and computes the rest again during backward: less memory, more work; with
    tp > 1 it repeats the sums of its forward pass, too."""
    codec: CodecName = "raw"
    """As what bytes activations cross the cuts between stages."""
    gradient_codec: CodecName | None = None
    """As what bytes their gradients come back; like ``codec`` where left out."""
    memory: Literal["none", "delta"] = "none"
    """delta: of activations, only the change against the same sample's last ones is sent (AQ-SGD, Wang 2022)."""
    reference_mb: Positive = 64.0
    """What a stage may keep of past activations for memory = "delta", in 10^6 bytes a cut; samples beyond it travel
    without memory."""
    tensor_codec: CodecName = "raw"
    """As what bytes the sums of the tensor axis travel."""


class RuleConfig(Section, frozen=True, kw_only=True):
    """[[exchange.rule]]: the codec of the tensors whose name matches; the first match wins."""

    match: str
    """Shell pattern of tensor names, such as ``*.norm*``."""
    codec: TensorCodecName
    """Codec of those tensors."""


class ExchangeConfig(Section, frozen=True, kw_only=True):
    """[exchange]: when, how and as what bytes gradients travel."""

    when: Literal["sync", "local", "server"] = "sync"
    """When gradients leave. sync: after every step. local: replicas train alone for ``h`` steps and then exchange how
    their weights have changed (DiLoCo, Douillard 2023). server: ranks of their own hold weights and optimizer; workers
    send them gradients and get the change of the weights back."""
    collective: CollectiveName = "direct"
    """How they travel. direct: every rank sends each owner its part and gets the sum back, 2 latencies; ring: 2 (p - 1)
    messages to the neighbour, for stations wired as a ring; server: through ``servers`` that add up; native:
    MPI_Allreduce, codec raw only."""
    codec: TensorCodecName = "int8"
    """As what bytes. raw: float32 itself; fp16, bf16: 2 bytes a value; int8: 1.02 bytes, int4: 0.52 and int2: 0.27,
    with a scale for 128 values; sign: an eighth, with a scale for 256; topk-N: the largest of every N values; ecq-BITS:
    about so many bits a value, ecq-XdB: as many as a signal X dB above the noise needs, entropy-coded; int8-rans,
    int4-rans, int2-rans: int8, int4 and int2, entropy-coded; lowrank-R: matrices as the two factors of a sum of rank R
    (PowerSGD, Vogels 2019), in two sums one after the other. With all but raw, 1-D tensors and those below 1,024
    elements travel as fp16 unless a rule says otherwise."""
    factor_codec: CodecName = "fp16"
    """As what bytes the factors of codec lowrank travel, and the larger tensors that these would not halve: m x n with
    mn at most 2 R (m + n). What its rounding loses goes to the residual of the matrix."""
    memory: MemoryName | None = None
    """What is remembered of earlier steps. residual: what rounding lost is added to the next gradient; delta: only the
    change against the last one is sent (with int2, sign and topk: of signal = "momentum", by collective = "direct");
    none. Left out: residual, or none for codec raw."""
    signal: Literal["gradient", "momentum", "preconditioned"] = "gradient"
    """What travels. preconditioned: the gradient over the root of adamw's second moment, so that the noise of a codec
    is small beside what is usual for every weight. momentum: every rank's own running mean of its gradients, which the
    optimizer then takes as it comes: for sgd its momentum (``optim.momentum``), for adamw the first moment, with the
    second one frozen after ``warmup_steps`` (1-bit Adam, Tang 2021). ``train.clip_norm`` then bounds the norm of that
    sum."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """stochastic: right on average, with more noise (codecs int8 and int4)."""
    overlap: bool = True
    """Start a bucket as soon as backward has filled it; off: after backward. Same bits, same bytes."""
    bucket_mb: Positive | None = None
    """Size of a bucket in 10^6 bytes of float32; a sixth of the model where left out."""
    segment_kb: Index = 256
    """Size of the messages in which a rank's part of a bucket travels, in 10^3 bytes of float32, so that coding and the
    wire go on side by side; 0: it is one message."""
    rule: tuple[RuleConfig, ...] = ()
    """Codecs of single tensors; the first match wins."""
    warmup_steps: Index = 0
    """Steps at the start in which everything travels raw; memories begin after them. Not the warm-up of the rate, which
    is ``optim.warmup_steps``."""
    raw_last_steps: Index = 0
    """Steps at the end, up to ``train.steps``, in which everything travels raw; what the memories hold then is left."""
    reset_every: Index = 0
    """Steps after which residuals are set to zero, for comparison: it throws away what rounding has lost so far. 0:
    never, it is carried on."""

    h: Count = 30
    """Optimizer steps of a replica between two exchanges (when = "local"); evaluations, saves and stops wait for
    them."""
    outer_lr: Positive = 0.7
    """Share of the mean change that the common weights take over."""
    outer_momentum: Fraction = 0.5
    """Decay of the running sum of mean changes, with Nesterov's look ahead; 0: none. 0.9, as is common in long
    trainings, needs many dozens of rounds."""
    fragments: Count = 1
    """Parts of the model that leave one after the other, at even distances within the ``h`` steps (Streaming DiLoCo,
    Douillard 2025): the same bytes, a lower peak."""
    delay: Index = 0
    """Steps for which a part is under way while training goes on; less than h / fragments."""
    merge: Fraction = 0.0
    """Share of its own weights that a replica keeps when a part arrives."""

    servers: Index | None = None
    """Ranks, beyond dp * pp * tp, that hold the weights (when = "server") or add up (collective = "server"): for every
    part of the model. 1 where needed and left out. They are the last ranks."""
    mode: Literal["sync", "ssp", "async"] = "sync"
    """When a server takes a gradient over. sync: once those of all workers are in; ssp: the same, but a worker may be
    ``staleness`` steps ahead of the slowest (Ho 2013); async: each as it comes."""
    staleness: Index = 0
    """Steps that a worker may be ahead of the slowest one (mode = "ssp")."""
    window: Count = 1
    """Gradients of a worker that may be without an answer (mode = "async")."""
    server_codec: CodecName = "int8"
    """As what bytes a worker gets the change of the weights against those that it has; raw: the weights themselves."""
    aggregate: Count | None = None
    """Workers whose gradients are enough for a step, the others being a reserve; left out: all."""
    late: Literal["apply", "drop"] = "apply"
    """What becomes of a gradient that comes after its step was taken: apply: it counts in the next one; drop: it is
    counted and forgotten."""
    delay_compensation: Literal["none", "fixed", "adaptive"] = "none"
    """Whether a late gradient is corrected for what the weights have changed meanwhile (DC-ASGD, Zheng 2017)."""
    dc_strength: Positive = 0.04
    """Weight of the correction; for adaptive, over the root of the gradient's mean square."""
    dc_decay: Fraction = 0.95
    """Decay of that mean square."""
    staleness_lr: Literal["none", "inverse"] = "none"
    """inverse: the rate is divided by 1 + the updates that came between (mode = "async")."""


class CheckpointConfig(Section, frozen=True, kw_only=True):
    """[checkpoint]: what is kept of a run."""

    every: Index = 100
    """Steps between checkpoints; 0: only at the end."""
    keep: Count = 2
    """Newest checkpoints that stay; older ones are removed."""


class NetworkConfig(Section, frozen=True, kw_only=True):
    """[network]: limits of the transport."""

    peer_timeout_s: Positive = 60.0
    """Silence after which a peer counts as lost; longer than the longest outage to be tolerated, and than the step that
    the slowest rank takes longer than the others: servers compute nothing, and wait for the whole of it."""
    max_message_mb: Annotated[float, Meta(ge=1e-3, le=2047)] = 4.0
    """Messages above this size (10^6 bytes) are sent in pieces. A piece is what a slow link must deliver within
    ``peer_timeout_s``."""


class RunConfig(Section, frozen=True, kw_only=True):
    """[run]: where results go."""

    folder: Annotated[str, Meta(min_length=1)] = "runs/default"
    """Run folder: configuration, metrics, summary and checkpoints."""
    shared_fs: bool = True
    """Whether all ranks see the same run folder; off: each host keeps its own."""
    time_limit_s: Positive | None = None
    """Seconds from the start of the process after which the job will be ended from outside; the run stops before, with
    a checkpoint and exit code 75."""
    time_margin_s: NonNegative = 10.0
    """Part of ``time_limit_s`` to keep in reserve; twice the longest save and step so far, if that is more."""


class Config(Section, frozen=True, kw_only=True):
    """A whole run."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optim: OptimConfig = OptimConfig()
    parallel: ParallelConfig = ParallelConfig()
    exchange: ExchangeConfig = ExchangeConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    network: NetworkConfig = NetworkConfig()
    run: RunConfig = RunConfig()

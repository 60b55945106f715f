"""The same training step by torch's DistributedDataParallel over gloo: the only module that imports torch.

The model is ours with another library's operators: the same layers, names, shapes and first weights, the same samples,
loss, clipping and optimizer, one thread a rank. That it is the same shows at the first step of both: loss and gradient
norm agree.
"""

import datetime
import socket
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from mpitrain.bench.gloo import choose_interface
from mpitrain.bench.ours import TrainingStep
from mpitrain.bench.rounds import Family, Taken
from mpitrain.comm.agreement import agree, gather
from mpitrain.comm.grid import Axis
from mpitrain.config.schema import Config, ModelConfig, Task
from mpitrain.data.dataset import Samples
from mpitrain.errors import ConfigError, LaunchError
from mpitrain.params import Params
from mpitrain.train.build import Parts
from mpitrain.train.weights import make_schedule

Tensor = Any
"""A torch.Tensor: types must check where torch is not installed, too."""


class Attention(torch.nn.Module):
    """Multi-head self-attention; the rows of its first map in the order of ours: head, one of q k v, channel."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, C) to (B, T, C)."""
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, self.heads, 3, width // self.heads).permute(3, 0, 2, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(batch, time, width))


class FeedForward(torch.nn.Module):
    """Two maps with a GELU between them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.hidden = torch.nn.Linear(width, hidden)
        self.out = torch.nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, C) to (B, T, C)."""
        return self.out(functional.gelu(self.hidden(x), approximate="tanh"))


class Block(torch.nn.Module):
    """The pre-norm block."""

    def __init__(self, model: ModelConfig, *, causal: bool) -> None:
        super().__init__()
        width = model.d_model
        self.norm1 = torch.nn.LayerNorm(width)
        self.attention = Attention(width, model.heads, causal=causal)
        self.norm2 = torch.nn.LayerNorm(width)
        self.mlp = FeedForward(width, model.d_ff or 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, C) to (B, T, C)."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(torch.nn.Module):
    """`mpitrain.nn.models.Transformer` with torch's operators; its parameters have the names of ours."""

    def __init__(self, model: ModelConfig, *, time: int, inputs: int, outputs: int, tokens: bool) -> None:
        super().__init__()
        width = model.d_model
        self.task = model.task
        if tokens:
            self.embedding = torch.nn.Embedding(inputs, width)
        else:
            self.input = torch.nn.Linear(inputs, width)
        self.positions = torch.nn.Embedding(time, width)
        causal = model.causal or model.task == "lm"
        self.blocks = torch.nn.ModuleList(Block(model, causal=causal) for _ in range(model.layers))
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, F) or tokens (B, T) to what the task asks for."""
        first = self.embedding if hasattr(self, "embedding") else self.input
        h = first(x) + self.positions.weight
        for block in self.blocks:
            h = block(h)
        h = self.norm(h)
        if self.task == "classify":
            h = h.mean(dim=1)
        elif self.task == "forecast":
            h = h[:, -1]
        return self.head(h)


def our_name(name: str) -> str:
    """Return the name that a parameter has here for one of torch's."""
    module, _, what = name.rpartition(".")
    gain = what == "weight" and module.rpartition(".")[2].startswith("norm")
    return f"{module}.gain" if gain else name


def make_model(parts: Parts) -> Transformer:
    """Build the twin of a model, with its weights; raises RuntimeError where it is none."""
    dataset = parts.dataset
    model = Transformer(
        parts.config.model,
        time=dataset.input_shape[0],
        inputs=dataset.vocabulary or dataset.input_shape[1],
        outputs=dataset.num_outputs,
        tokens=bool(dataset.vocabulary),
    )
    copy_weights(model, parts.params)
    return model


def copy_weights(model: Transformer, params: Params) -> None:
    """Give the twin the weights of ours; raises RuntimeError where names or shapes are others."""
    ours = {name: tuple(values.shape) for name, values in params.items()}
    theirs = {our_name(name): tuple(values.shape) for name, values in model.named_parameters()}
    if ours != theirs:
        raise RuntimeError(f"the models differ: {sorted(ours.items() ^ theirs.items())}")
    with torch.no_grad():
        for name, values in model.named_parameters():
            values.copy_(torch.from_numpy(params[our_name(name)]))


def loss_of(task: Task, output: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of a batch."""
    if task == "forecast":
        return functional.mse_loss(output, targets)
    return functional.cross_entropy(output.flatten(0, -2), targets.flatten().long())


class TorchStep:
    """A training loop of torch.

    Parameters
    ----------
    name : str
        In tables.
    parts : Parts
        Ours: the first weights, and all settings of the training.
    samples : callable
        Returns this rank's samples of a step (0, 1, …).
    wrap : callable
        Makes the model one that exchanges gradients.
    """

    def __init__(
        self,
        name: str,
        parts: Parts,
        samples: Callable[[int], Samples],
        wrap: Callable[[Any], Any] = lambda model: model,
    ) -> None:
        self.name = name
        self._config, self._samples = parts.config, samples
        self._schedule = make_schedule(parts.config.optim, parts.config.train.steps)
        self._model = wrap(make_model(parts))
        self._optimizer = make_optimizer(parts.config, self._model)
        self._step = 0

    def step(self) -> Taken:
        """Take the next step."""
        config, samples = self._config, self._samples(self._step)
        for group in self._optimizer.param_groups:
            group["lr"] = self._schedule(self._step)
        self._optimizer.zero_grad(set_to_none=True)
        inputs = samples.x if samples.x.dtype.kind == "f" else samples.x.astype(np.int64)
        output = self._model(torch.from_numpy(inputs))
        loss = loss_of(config.model.task, output, torch.from_numpy(samples.y))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), config.train.clip_norm or float("inf"))
        self._optimizer.step()
        self._step += 1
        return Taken(loss.item(), norm.item())


def make_optimizer(config: Config, model: Any) -> Any:
    """Build the optimizer; its fastest form on a CPU. Weight decay is for matrices, as ours is."""
    optim = config.optim
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": optim.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    if optim.kind == "sgd":
        return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum, nesterov=optim.nesterov, fused=True)
    betas = (optim.beta1, optim.beta2)
    return torch.optim.AdamW(groups, lr=optim.lr, betas=betas, eps=optim.eps, fused=True)


def refusals(config: Config) -> list[str]:
    """List the settings that the twin does not have."""
    model, train = config.model, config.train
    return [
        *['model.kind = "transformer"'] * (model.kind != "transformer"),
        *["model.dropout = 0"] * (model.dropout > 0),
        *["model.label_smoothing = 0"] * (model.label_smoothing > 0),
        *["model.tied = false"] * model.tied,
        *['train.class_weights = "equal"'] * (train.class_weights != "equal"),
    ]


class TorchFamily:
    """DDP in float32 and with the hook that compresses to fp16, and the bare model. Collective over ``world``.

    Parameters
    ----------
    alone : TrainingStep
        Our step without exchange: the bare model takes the same samples.
    joint : TrainingStep
        Our step with exchange.
    timeout_s : float
        Patience of gloo.

    Raises
    ------
    ConfigError
        Settings that the twin does not have.
    LaunchError
        The ranks did not find each other.
    """

    def __init__(self, world: Axis, alone: TrainingStep, joint: TrainingStep, *, timeout_s: float) -> None:
        config = joint.parts.config
        agree(world, lambda: check(config))
        torch.set_num_threads(1)
        join(world, timeout_s)
        ways = [
            TorchStep("torch DDP fp32", joint.parts, samples_of(joint.parts), DistributedDataParallel),
            TorchStep("torch DDP fp16 hook", joint.parts, samples_of(joint.parts), half_precision),
        ]
        bare = TorchStep("torch without exchange", alone.parts, samples_of(alone.parts))
        self.family = Family(bare, ways)

    def close(self) -> None:
        """Leave the process group. Collective."""
        dist.destroy_process_group()


def check(config: Config) -> None:
    """Refuse a configuration whose model has no twin; raises ConfigError."""
    if remedies := refusals(config):
        raise ConfigError(f"bench step: torch's model has no such setting; set {', '.join(remedies)}")


def samples_of(parts: Parts) -> Callable[[int], Samples]:
    """Read the samples that our loop reads, without its threads."""
    return lambda step: parts.dataset.train(parts.sampler.indices(step))


def half_precision(model: Any) -> Any:
    """Have DDP send gradients as fp16."""
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return wrapped


def join(world: Axis, timeout_s: float) -> None:
    """Start gloo's process group over the interface that MPI uses. Collective over ``world``."""
    hosts = cast(Sequence[str], gather(world, socket.gethostname()))
    address = agree(world, lambda: choose_interface(one_host=len(set(hosts)) == 1))
    timeout = datetime.timedelta(seconds=timeout_s)
    store = agree(world, lambda: _store(address, 0, world.size, timeout) if world.rank == 0 else None)
    place = cast(Collection[Any], gather(world, [address, store.port] if store else None))
    root, port = next(item for item in place if item)
    store = agree(world, lambda: store or _store(root, port, world.size, timeout, leads=False))
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=timeout)


def _store(address: str, port: int, ranks: int, timeout: datetime.timedelta, *, leads: bool = True) -> Any:
    """Open the key-value store through which ranks find each other; the first rank's is the server."""
    try:
        return dist.TCPStore(address, port, ranks, leads, timeout, wait_for_workers=False)
    except (dist.DistError, RuntimeError) as error:
        raise LaunchError(f"bench step: torch's store at {address}:{port}: {error}") from None

"""Models cut over ranks, and the same models whole: what the tests of the pipeline share."""

from dataclasses import dataclass

import numpy as np

from mpitrain.collectives.base import Transport
from mpitrain.comm.grid import Axis
from mpitrain.nn.layer import EVALUATE, Chain, Context
from mpitrain.nn.loss import cross_entropy
from mpitrain.nn.models import Mlp, Transformer
from mpitrain.parallel.pipeline import Pipeline, PipelineSettings
from mpitrain.params import Layout, Params
from mpitrain.partition import bounds, split_sizes

CLASSES = 5
MODELS = {
    "mlp": lambda: Mlp(inputs=12, hidden=(16, 7, 24, 9), outputs=CLASSES, activation="gelu", dropout=0.2),
    "classify": lambda: Transformer(
        task="classify", time=4, d_model=8, blocks=5, heads=2, d_ff=12, outputs=CLASSES, features=3, dropout=0.2
    ),
    "lm": lambda: Transformer(
        task="lm", time=4, d_model=8, blocks=5, heads=2, d_ff=12, outputs=CLASSES, vocabulary=CLASSES, dropout=0.2
    ),
}
"""At least ten layers each, so that five ranks can hold two pieces."""

KEY = 2**63 + 11


@dataclass
class Data:
    """A batch, and which samples of the data set it has."""

    x: np.ndarray
    y: np.ndarray
    context: Context

    def loss(self, output, part):
        return cross_entropy(output, self.y[part], total_weight=3.0 * max(1, self.y.size))


def batch(model, size, dtype=np.float64, first=100):
    rng = np.random.default_rng([size, first])
    if model == "lm":
        x, y = rng.integers(0, CLASSES, (2, size, 4))
    else:
        x, y = rng.standard_normal((size, 4, 3)).astype(dtype), rng.integers(0, CLASSES, size)
    return Data(x, y, Context(train=True, key=KEY, samples=first + 3 * np.arange(size)))


def weights(chains, dtype=np.float64):
    """Parameters of some pieces, large enough for every path to matter, the same for a tensor on whatever rank."""
    specs = {spec.name: spec for chain in chains for spec in chain.specs()}
    params = Params(Layout(list(specs.values())), dtype)
    params.initialize(5)
    params.flat *= 3
    return params


def pieces(model, number):
    """Cut a chain of layers into pieces of about equal length; return them and the shapes between them."""
    chains = [Chain(model.layers[a:b]) for a, b in bounds(split_sizes(len(model.layers), number))]
    return chains


def shapes(chains, x):
    params, found = weights(chains), []
    for chain in chains:
        x, _ = chain.forward(params, x, EVALUATE)
        found.append(x.shape[1:])
    return found[:-1]


class Cut:
    """This rank's end of a model that is cut over a communicator."""

    def __init__(self, comm, name, *, chunks=1, dtype=np.float64, transport=None, **settings):
        self.axis = Axis(comm, "pipeline")
        self.model = MODELS[name]() if isinstance(name, str) else name
        self.name, self.dtype = name, dtype
        chains = pieces(self.model, chunks * comm.size)
        self.cut_shapes = shapes(chains, batch(name, 1).x)
        mine = chains[comm.rank :: comm.size]
        self.params = weights(mine, dtype)
        self.grads = self.params.zeros_like()
        self.pipeline = Pipeline(
            self.axis,
            mine,
            PipelineSettings(schedule=settings.pop("schedule", "interleaved" if chunks > 1 else "1f1b"), **settings),
            cut_shapes=self.cut_shapes,
            transport=transport or Transport(timeout_s=30),
            dtype=dtype,
        )
        self.first, self.last = comm.rank == 0, comm.rank == comm.size - 1

    def step(self, data, **callbacks):
        """Run a batch on zeroed gradients; only the ends see it."""
        self.grads.flat[:] = 0
        x = data.x if self.first else None
        loss = data.loss if self.last else None
        return self.pipeline.run(self.params, self.grads, x, data.context, loss=loss, **callbacks)

    def evaluate(self, data):
        x = data.x if self.first else None
        return self.pipeline.evaluate(self.params, x, len(data.y), loss=data.loss if self.last else None)


def whole(name, data, dtype=np.float64):
    """Gradients and loss of one rank that holds everything and takes the batch as one."""
    model = MODELS[name]() if isinstance(name, str) else name
    params = weights([model], dtype)
    grads = params.zeros_like()
    output, cache = model.forward(params, data.x, data.context)
    result = data.loss(output, slice(None))
    model.backward(params, cache, result.dout, grads)
    return grads, result


def distance(grads, expected):
    """Largest difference of any tensor, relative to that tensor."""
    scale = {name: max(np.abs(expected[name]).max(), 1e-300) for name in grads}
    return float(max((np.abs(grads[name] - expected[name]).max() / scale[name] for name in grads), default=0.0))

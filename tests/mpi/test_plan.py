"""What `mpitrain plan` predicts is what a run counts: bytes and messages of every rank, and what it remembers."""

import itertools

import pytest

from mpitrain.checkpoint.store import CheckpointStore
from mpitrain.collectives.predicted import Sent
from mpitrain.collectives.registry import make_reducer
from mpitrain.config.load import resolve
from mpitrain.config.validate import refusal
from mpitrain.data.profiles import PROFILES
from mpitrain.nn.models import Mlp, Transformer
from mpitrain.params import Layout, Params
from mpitrain.train.exchange import SyncExchange, group_of
from mpitrain.train.predicted import predict_exchange, predict_memories
from mpitrain.train.run import train

STEPS = 2
CLASSES = len(PROFILES)
BASE = {
    "data": {"stations": 6, "samples": 60, "test_samples": 12, "window": 4},
    "train": {"steps": STEPS, "batch_size": 12, "eval_every": 0},
    "checkpoint": {"every": 0},
}
MODELS = {
    "mlp": ({"kind": "mlp", "hidden": [40, 24]}, Mlp(inputs=20, hidden=(40, 24), outputs=len(PROFILES))),
    "transformer": (
        {"layers": 1, "d_model": 32, "heads": 2},
        Transformer(
            task="classify", time=4, d_model=32, blocks=1, heads=2, d_ff=128, outputs=len(PROFILES), features=5
        ),
    ),
}
EXCHANGES = [
    {"collective": collective, "codec": codec, "memory": memory}
    for collective, codec, memory in itertools.product(
        ["native", "ring", "direct"], ["raw", "fp16", "int8"], ["none", "residual", "delta"]
    )
    if refusal(collective, codec, memory) is None
]
RULED = {"codec": "int8", "memory": "delta", "bucket_mb": 0.005, "rule": [{"match": "*.bias", "codec": "raw"}]}


@pytest.mark.parametrize("model", MODELS)
def test_a_training_sends_what_is_predicted(world, folder, monkeypatch, model):
    monkeypatch.setattr(CheckpointStore, "save", lambda store, snapshot: None)
    table, chain = MODELS[model]
    for exchange in [*EXCHANGES, RULED] if model == "mlp" else [{}, RULED]:
        tree = BASE | {"model": table, "exchange": exchange, "run": {"folder": str(folder / "run")}}
        resolved = resolve(tree, "test", [])
        counted = train(resolved, world, overwrite=True)["per_rank"]
        predicted = predict_exchange(chain.specs(), resolved.config.exchange, world.size)
        sent = [Sent(one["sent_bytes"], one["messages"]) for one in counted]
        assert sent == [one * STEPS for one in predicted], exchange


def test_an_exchange_remembers_what_is_predicted(axis):
    for exchange in [*EXCHANGES, RULED]:
        config = resolve({"exchange": exchange}, "test", []).config.exchange
        for _, chain in MODELS.values():
            grads = Params(Layout(chain.specs(), group_of(config)))
            state = SyncExchange(make_reducer(config.collective, axis), grads, config, seed=0).state()
            held = sum(buffer.current.nbytes + buffer.next.nbytes for buffer in state.values())
            assert held == predict_memories(chain.specs(), config, axis.size)[axis.rank], exchange

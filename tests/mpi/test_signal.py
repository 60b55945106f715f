"""Momenta, or preconditioned gradients, in place of gradients: resumed and rejected like any other training."""

import numpy as np
import pytest
from mpi4py import MPI

from mpitrain.collectives.predicted import Sent
from mpitrain.config.load import resolve
from mpitrain.data.profiles import PROFILES
from mpitrain.nn.models import Mlp
from mpitrain.train.loop import Loop
from mpitrain.train.predicted import predict_exchange, predict_memories
from mpitrain.train.run import train

WORLD = MPI.COMM_WORLD.Get_size()
BASE = {
    "model": {"kind": "mlp", "hidden": [40, 24]},
    "data": {"stations": 6, "samples": 60, "test_samples": 12, "window": 8},
    "train": {"steps": 6, "batch_size": 12, "eval_every": 0, "clip_norm": 0.0},
    "optim": {"schedule": "constant", "lr": 0.01, "weight_decay": 0.1},
    "checkpoint": {"every": 0},
}
SGD = {"optim": BASE["optim"] | {"kind": "sgd", "momentum": 0.8}}
RAW = {"codec": "raw", "memory": "none"}
MOMENTUM = {"signal": "momentum", "warmup_steps": 2}
PRECONDITIONED = {"signal": "preconditioned"}


def run(world, folder, *trees, overrides=(), resume=None):
    tree = BASE | {"run": {"folder": str(folder / "run")}}
    for more in trees:
        tree |= {key: tree.get(key, {}) | values for key, values in more.items()}
    resolved = resolve(tree, "test", list(overrides))
    return resolved.config, train(resolved, world, overwrite=resume is None, resume=resume)


@pytest.fixture
def seen(monkeypatch):
    """Weights, gradients as the optimizer takes them, and its buffers, after every step."""
    found, take = [], Loop.round

    def recorded(loop):
        weights = loop.parts.exchange.weights
        result = take(loop)
        buffers = {name: buffer.flat.copy() for name, buffer in weights.state.buffers.items()}
        found.append((weights.params.flat.copy(), weights.grads.flat.copy(), buffers))
        return result

    monkeypatch.setattr(Loop, "round", recorded)
    return found


def test_sgd_moves_by_the_sum_of_all_momenta(world, folder, seen):
    """As by the momentum of the sum, which is the same number."""
    run(world, folder, SGD, {"exchange": RAW})
    plain = [params for params, _, _ in seen]
    seen.clear()
    run(world, folder, SGD, {"exchange": RAW | {"signal": "momentum"}})
    assert [set(buffers) for _, _, buffers in seen] == [set()] * 6
    np.testing.assert_allclose(np.array([params for params, _, _ in seen]), np.array(plain), atol=2e-6)


def test_adamw_with_a_frozen_second_moment(world, folder, seen):
    """The first two steps to the bit, and then the moments of numpy, with none below a hundredth of the mean."""
    config, _ = run(world, folder, {"exchange": RAW})
    plain = list(seen)
    seen.clear()
    run(world, folder, {"exchange": RAW | MOMENTUM})
    for (params, *_), (other, *_) in zip(seen[:2], plain[:2], strict=True):
        assert (params == other).all()
    specs = Mlp(inputs=8 * 5, hidden=(40, 24), outputs=len(PROFILES)).specs()
    second, first, root = plain[1][2]["second"], plain[1][2]["first"], seen[2][2]["second"]
    assert sum(spec.size for spec in specs) <= second.size
    floors = root / np.sqrt(second / (1 - config.optim.beta2**2), out=np.ones_like(root), where=second > 0)
    assert (floors[second > 0] >= 1 - 1e-5).all()
    assert np.isclose(floors[second > second.mean()], 1).all()
    for index in range(2, 6):
        params, moment, buffers = seen[index]
        assert (buffers["second"] == root).all()
        assert (buffers["first"] == moment).all()
        rate = config.optim.lr / (1 - config.optim.beta1 ** (index + 1))
        step = rate * moment / (root + config.optim.eps)
        moved = seen[index - 1][0] - params
        decay = config.optim.lr * config.optim.weight_decay * seen[index - 1][0]
        off = np.minimum(np.abs(moved - step), np.abs(moved - step - decay))
        assert off.max() < 1e-6
    # The first moment goes on where it was: 0.9 of it and 0.1 of a gradient near the one of the plain run.
    new = (seen[2][1] - 0.9 * first) / 0.1
    assert np.abs(new - (plain[2][2]["first"] - 0.9 * first) / 0.1).max() < 1e-4


TRAININGS = [
    {"codec": "int4"},
    {"codec": "sign", "memory": "delta"},
    {"codec": "topk-8", "memory": "delta", "segment_kb": 1},
    {"codec": "int2", "collective": "ring", "raw_last_steps": 1},
    {"codec": "lowrank-2"},
    *([{"codec": "int8", "memory": "delta", "collective": "server"}] if WORLD > 1 else []),
]
TRAININGS = [exchange | MOMENTUM for exchange in TRAININGS] + [
    {"codec": "ecq-2"} | PRECONDITIONED,
    {"codec": "int4", "collective": "ring", "segment_kb": 1, "warmup_steps": 1} | PRECONDITIONED,
    {"codec": "lowrank-2"} | PRECONDITIONED,
]


@pytest.mark.parametrize("exchange", TRAININGS, ids=str)
def test_a_training_costs_what_is_predicted_and_resumes_to_the_same_bits(world, folder, exchange):
    settings = [{"exchange": exchange}]
    config, whole = run(world, folder, *settings)
    assert whole["replicas_identical"] is True
    specs = Mlp(inputs=8 * 5, hidden=(40, 24), outputs=len(PROFILES)).specs()
    memories = predict_memories(specs, config.exchange, world.size)
    assert [one["memories_bytes"] for one in whole["per_rank"]] == memories
    raw = config.exchange.warmup_steps + config.exchange.raw_last_steps
    kinds = [
        [one * times for one in predict_exchange(specs, config.exchange, world.size, raw=way)]
        for way, times in ((True, raw), (False, 6 - raw))
    ]
    predicted = [first + second for first, second in zip(*kinds, strict=True)]
    sent = [Sent(one["sent_bytes"], one["messages"], about=predicted[0].about) for one in whole["per_rank"]]
    assert [one.messages for one in sent] == [one.messages for one in predicted]
    if not predicted[0].about:
        assert sent == predicted
    if exchange.get("raw_last_steps"):
        return  # which steps travel raw depends on train.steps
    for first in (2, 4):
        run(world, folder, *settings, overrides=[f"train.steps={first}"])
        _, parts = run(world, folder, *settings, resume="newest")
        assert parts["param_sha256"] == whole["param_sha256"]


def test_a_rejected_step_leaves_the_momentum(world, folder, monkeypatch):
    """A step that is skipped on all ranks changes nothing, be it the first one that is frozen."""
    momenta, take = [], Loop.round

    def recorded(loop):
        result = take(loop)
        momenta.append((loop.counters.skipped, loop.parts.exchange.state()["momentum"].current.copy()))
        return result

    monkeypatch.setattr(Loop, "round", recorded)
    monkeypatch.setenv("MPITRAIN_FAULT", f"nan:rank={world.size - 1},step=4")
    run(world, folder, {"exchange": {"codec": "sign", "memory": "delta"} | MOMENTUM})
    assert [skipped for skipped, _ in momenta] == [0, 0, 0, 1, 1, 1]
    assert (momenta[3][1] == momenta[2][1]).all()
    assert (momenta[4][1] != momenta[3][1]).any()
    monkeypatch.setenv("MPITRAIN_FAULT", f"inf:rank={world.size - 1},step=3")
    _, summary = run(world, folder, {"exchange": {"codec": "int4"} | MOMENTUM})
    assert summary["replicas_identical"] is True
    assert [skipped for skipped, _ in momenta[6:]] == [0, 0, 1, 1, 1, 1]


def test_a_preconditioned_gradient_is_the_gradient_again(world, folder, seen):
    """Where nothing is lost on the way; the first step, which knows no second moment, to the bit."""
    run(world, folder, {"exchange": RAW})
    plain = list(seen)
    seen.clear()
    run(world, folder, {"exchange": RAW | PRECONDITIONED})
    assert (seen[0][0] == plain[0][0]).all()
    for (params, grads, _), (expected, expected_grads, _) in zip(seen, plain, strict=True):
        np.testing.assert_allclose(grads, expected_grads, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(params, expected, atol=1e-4)


@pytest.mark.skipif(WORLD == 1, reason="one rank sends nothing")
def test_noise_is_small_beside_what_is_usual_for_a_weight(world, folder, seen):
    """Of weights with small gradients ecq-3 loses less in these units; the other half pays with a little more."""
    noise = {}
    for signal in ("gradient", "preconditioned"):
        found = []
        for raw_steps in (5, 4):
            exchange = {"codec": "ecq-3", "signal": signal, "warmup_steps": raw_steps}
            seen.clear()
            run(world, folder, {"exchange": exchange}, overrides=["train.steps=6", "optim.beta2=0.8"])
            found.append(seen[4][1])
            usual = np.sqrt(seen[3][2]["second"])
        sizes = usual[usual > 0]
        off = np.abs(found[1] - found[0])[usual > 0] / sizes
        noise[signal] = [np.median(off[sizes < np.median(sizes)]), np.median(off[sizes >= np.median(sizes)])]
    (small, large), (small_in_units, large_in_units) = noise.values()
    assert small_in_units < 0.9 * small
    assert large < large_in_units < small_in_units


@pytest.mark.skipif(WORLD != 4, reason="two replicas of two ranks")
@pytest.mark.parametrize(("signal", "optim"), [("momentum", SGD), ("preconditioned", {})])
@pytest.mark.parametrize("axis_name", ["tp", "pp"])
def test_parts_of_a_model(world, folder, axis_name, signal, optim):
    """Every rank has the momentum, or the moments, of what it holds: the same training as by gradients."""
    losses = []
    for way in ("gradient", signal):
        more = {"parallel": {"dp": 2, axis_name: 2}, "exchange": RAW | {"signal": way}}
        _, summary = run(world, folder, optim, more)
        assert summary["replicas_identical"] is True
        losses.append(summary["loss"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5 if signal == "momentum" else 1e-4)


def test_another_number_of_ranks_begins_with_equal_shares(world, folder, monkeypatch):
    """What is not saved for this layout comes from the first moment, which all know."""
    settings = [{"exchange": {"codec": "int4"} | MOMENTUM}]
    run(world, folder, *settings, overrides=["train.steps=4"])
    firsts, begin = [], Loop.begin_round

    def recorded(loop):
        exchange = loop.parts.exchange
        exchange.loaded({"optimizer_step": exchange.weights.state.step}, local=False)
        firsts.append(
            (exchange.state()["momentum"].current.copy(), exchange.weights.state.buffers["first"].flat.copy())
        )
        begin(loop)

    monkeypatch.setattr(Loop, "begin_round", recorded)
    run(world, folder, *settings, resume="newest")
    momentum, first = firsts[0]
    assert (momentum == first / np.float32(world.size)).all()
    assert np.abs(first).max() > 0

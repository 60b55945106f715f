"""Small problems that a coarse codec alone does not solve, and what each kind of feedback makes of them."""

from functools import cache

import numpy as np
import pytest

from mpitrain.codecs.memory import SENDERS, NoMemory
from mpitrain.codecs.noise import noise_key
from mpitrain.codecs.registry import make_codec
from mpitrain.codecs.topk import TopK

PLANAR = ["int2", "sign"]


class Shift(NoMemory):
    """Sends C(x - h), is read as h plus that, and moves h by a share of it.

    With all of it and a codec that errs by less than it is given, this is EF21 (Richtárik 2021); with a share that the
    variance of an unbiased codec allows, DIANA (Mishchenko 2019).
    """

    def __init__(self, codec, start, share=1.0):
        super().__init__(codec, start.size)
        self.shift = start.copy()
        self.share = share

    def encode(self, x, wire, decoded, *, key, first, at=0):
        found = super().encode(x - self.shift, wire, decoded, key=key, first=first)
        moved = self.shift + self.share * decoded
        decoded += self.shift
        self.shift = moved
        return found


def sent(sender, x, key=0):
    """Return what the other end decodes."""
    wire, decoded = np.zeros(sender.max_nbytes(x.size), np.uint8), np.empty_like(x)
    assert sender.encode(x, wire, decoded, key=key, first=0)[1] == 0
    sender.commit()
    return decoded


# One worker.


@pytest.mark.parametrize("name", PLANAR)
def test_least_squares_where_signs_stall(name):
    """One sample at a time, all of whose gradients have the signs (1, -1) or (-1, 1) (Karimireddy 2019).

    Every step then keeps the sum of both weights, which is 2 at first and 0 at the solution.
    """
    samples = np.array([[1.1, -0.9], [-0.9, 1.1]])
    found = {}
    for memory in ("none", "residual"):
        sender, weights = SENDERS[memory](make_codec(name, np.float64), 2), np.ones(2)
        for step in range(3000):
            row = samples[step % 2]
            weights -= 0.05 * sent(sender, 2 * (row @ weights) * row)
        found[memory] = weights
    assert found["none"].sum() == pytest.approx(2, abs=1e-9)
    assert np.abs(found["residual"]).max() < 0.01


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize(("name", "bound"), [("bf16", 0.02), ("int2", 4), ("sign", 8)])
def test_residual_loses_nothing(name, bound, dtype):
    """The sum of what was decoded plus the residual is the sum of what was sent."""
    rng, sender = np.random.default_rng(2), SENDERS["residual"](make_codec(name, dtype), 300)
    inputs, outputs = np.zeros(300), np.zeros(300)
    for _ in range(300):
        x = rng.standard_normal(300).astype(dtype)
        inputs += x
        outputs += sent(sender, x)
    residual = sender.states()["residual"].current
    assert np.abs(outputs + residual - inputs).max() <= 300 * 16 * np.finfo(dtype).eps
    assert 0 < np.abs(residual).max() <= bound


RARE = np.array([[2.7], *[[-0.3]] * 9])
"""Of mean 0, and mostly of one sign."""
LOPSIDED = np.array([[2.0, 0.0], [0.0, 1.0], [-2.0, -1.0]])
"""Of mean 0, and the larger of each two is not (Fatkhullin 2023)."""


def descend_by_samples(codec, feedback, noise, momentum=1.0, steps=1000):
    """Minimize |x|^2 / 2 from ones, each gradient with noise of its own, at a rate that falls as 1 / step.

    Returns the root mean square of x in the last quarter of the steps.
    """
    rng, size = np.random.default_rng(0), 64
    x = np.ones(size)
    mean = x.copy()
    sender = Shift(codec, x) if feedback == "shift" else SENDERS[feedback](codec, size)
    squares = []
    for step in range(steps):
        gradient = x + rng.choice(noise, size // noise.shape[1]).reshape(-1)
        mean += momentum * (gradient - mean)
        x = x - 0.05 / (1 + step / 100) * sent(sender, mean)
        squares.append(np.mean(x**2))
    return float(np.sqrt(np.mean(squares[-steps // 4 :])))


@pytest.mark.parametrize(("name", "noise"), [("sign", RARE), ("topk-32", LOPSIDED)], ids=["sign", "topk"])
def test_differences_of_means_descend_where_those_of_samples_do_not(name, noise):
    """The shift runs after every sample, and the codec makes a bias of the noise; after their mean it does not."""
    codec = make_codec(name, np.float64)
    means = descend_by_samples(codec, "shift", noise, momentum=0.02)
    exact = descend_by_samples(make_codec("raw", np.float64), "none", noise)
    assert means < 1.5 * exact
    assert descend_by_samples(codec, "residual", noise) < 1.5 * exact
    assert descend_by_samples(codec, "shift", noise) > 3 * means
    assert descend_by_samples(codec, "none", noise) > 3 * means


# Workers whose gradients differ.

SLOPES = np.array([[-3.0, 2, 2], [2, -3, 2], [2, 2, -3]])


def three_gradients(x):
    """Of f_i(x) = <a_i, x>^2 + |x|^2 / 4; together their minimum is at 0."""
    return 2 * (SLOPES @ x)[:, None] * SLOPES + x / 2


def descend_by_largest(feedback, steps, rate=0.01):
    """Return the norm of the mean gradient after so many steps from (1, 1, 1) (Beznosikov 2020)."""
    x, codec = np.ones(3), TopK(np.float64, 3)
    senders = [Shift(codec, g) if feedback == "shift" else SENDERS[feedback](codec, 3) for g in three_gradients(x)]
    for _ in range(steps):
        x = x - rate * np.mean([sent(s, g) for s, g in zip(senders, three_gradients(x), strict=True)], axis=0)
    return float(np.linalg.norm(three_gradients(x).mean(axis=0)))


def test_the_largest_value_alone_diverges_and_feedback_converges():
    start = np.linalg.norm(three_gradients(np.ones(3)).mean(axis=0))
    assert descend_by_largest("none", 300) > 100 * start
    for feedback in ("residual", "shift"):
        assert descend_by_largest(feedback, 300) < start / 20
        assert descend_by_largest(feedback, 400, rate=0.05) < 1e-10


@cache
def least_squares(workers=3, size=256):
    """Return each worker's matrix and targets, the solution for all, and a rate."""
    rng = np.random.default_rng(0)
    matrices = rng.standard_normal((workers, size, size)) / np.sqrt(size) + np.eye(size)
    targets = 3 * rng.standard_normal((workers, size))
    curvature = sum(a.T @ a for a in matrices)
    solution = np.linalg.solve(curvature, sum(a.T @ b for a, b in zip(matrices, targets, strict=True)))
    return matrices, targets, solution, 0.3 / np.linalg.eigvalsh(curvature)[-1]


@cache
def distance_of_least_squares(name, memory, reset_every=0):
    """Return the relative distance from the solution after 600 steps, with residuals zeroed every so many."""
    matrices, targets, solution, rate = least_squares()
    senders = [SENDERS[memory](make_codec(name, np.float64), solution.size) for _ in matrices]
    weights = np.zeros(solution.size)
    for step in range(600):
        triples = zip(senders, matrices, targets, strict=True)
        weights -= rate / (1 + step / 100) * sum(sent(s, a.T @ (a @ weights - b)) for s, a, b in triples)
        if reset_every and (step + 1) % reset_every == 0:
            for sender in senders:
                sender.states()["residual"].current[:] = 0
    return float(np.linalg.norm(weights - solution) / np.linalg.norm(solution))


@pytest.mark.parametrize(("name", "stalls"), [("sign", 0.5), ("int2", 0.3)])
def test_least_squares_of_different_workers(name, stalls):
    """Where the workers' gradients cancel but do not vanish, what each one's rounding loses is the whole signal."""
    alone = distance_of_least_squares(name, "none")
    assert alone > stalls
    assert distance_of_least_squares(name, "residual") < alone / 20


@pytest.mark.parametrize("name", ["sign", "topk-8"])
def test_the_longer_residuals_are_carried_on_the_nearer_the_solution(name):
    """Zeroed after every step they are none; every tenth step, most of what they are for is lost."""
    always, tenth, never = (distance_of_least_squares(name, "residual", every) for every in (1, 10, 0))
    assert always == distance_of_least_squares(name, "none")
    assert always > 2 * tenth > 2 * 4 * never


@cache
def logistic_regression(workers=4, samples=64, size=128):
    """Return each worker's samples times their labels, whose balance differs, so that gradients remain at the optimum.

    The first feature is 10 times the others: it sets the scale with which int4 codes all the others.
    """
    rng = np.random.default_rng(0)
    features = rng.standard_normal((workers, samples, size))
    features[:, :, 0] = 10
    margins = (features @ rng.standard_normal((workers, size, 1)))[:, :, 0] / 4
    labels = np.where(rng.random(margins.shape) < 1 / (1 + np.exp(-margins)), 1.0, -1.0)
    return features * labels[:, :, None] / np.sqrt(size)


def logistic_gradients(x):
    """Of the mean loss of each worker's samples, and a decay of 0.1; (workers, size)."""
    samples = logistic_regression()
    return 0.1 * x - np.mean(samples / (1 + np.exp(samples @ x))[:, :, None], axis=1)


def descend_by_workers(feedback, codec, rounds, rate=1.0):
    """Return x after each of the rounds."""
    x = np.zeros(128)
    starts = np.zeros((4, x.size))
    senders = [Shift(codec, h, 0.5) if feedback == "shift" else SENDERS[feedback](codec, h.size) for h in starts]
    found = []
    for step in range(rounds):
        pairs = enumerate(zip(senders, logistic_gradients(x), strict=True))
        x = x - rate * np.mean([sent(s, g, noise_key(step, rank)) for rank, (s, g) in pairs], axis=0)
        found.append(x)
    return np.array(found)


def test_differences_of_workers_vanish_and_their_gradients_do_not():
    """What rounds the former errs ever less, so the descent is that of exact gradients; else it ends in a ball.

    The ball is smaller where rounding at random makes the workers' errors cancel.
    """
    exact = descend_by_workers("none", make_codec("raw", np.float64), 500)
    optimum = exact[-1]
    assert np.abs(logistic_gradients(optimum).mean(axis=0)).max() < 1e-14

    def distances(found):
        return np.linalg.norm(found - optimum, axis=1)[89:270:90] / np.linalg.norm(optimum)

    codec = make_codec("int4", np.float64, stochastic=True)
    found = {f: distances(descend_by_workers(f, codec, 270)) for f in ("none", "residual", "delta", "shift")}
    nearest = distances(descend_by_workers("none", make_codec("int4", np.float64), 270))
    for feedback in ("delta", "shift"):
        assert (found[feedback] < 2 * distances(exact)).all()
        assert found[feedback][-1] < 1e-12
    assert min(found["none"].min(), found["residual"].min()) > 0.03
    assert nearest.min() > 1.5 * found["none"].max()

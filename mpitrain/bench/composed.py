"""Time that steps would take over stated links, composed of measured computation and a cost model: never measured.

A message takes a link's delay, and a link carries bytes at its rate, one after the other; nothing overlaps with
computation but what a fragment's delay and a server's rule allow. Messages of a few numbers are left out.
"""

from dataclasses import dataclass
from math import ceil
from typing import cast

from mpitrain.config.schema import Config
from mpitrain.errors import ConfigError
from mpitrain.server.clocks import rule_of
from mpitrain.server.simulate import Costs, simulate

RAW_BYTES = 4


@dataclass(frozen=True)
class Link:
    """The link of every rank: as fast up as down.

    Attributes
    ----------
    rate_bytes_s : float
        Bytes a second.
    delay_s : float
        Of a message, one way.
    """

    rate_bytes_s: float
    delay_s: float


def parse_link(text: str) -> Link:
    """Read ``MBIT_S:MS``, such as ``20:20``: 20 Mbit/s and 20 ms one way; raises ConfigError."""
    try:
        rate, delay = (float(part) for part in text.split(":"))
    except ValueError:
        rate, delay = 0.0, 0.0
    if not (rate > 0 and delay >= 0):
        raise ConfigError(f"bench: --link: expected MBIT_S:MS such as 20:20 (20 Mbit/s, 20 ms one way), got {text!r}")
    return Link(rate * 1e6 / 8, delay / 1e3)


@dataclass(frozen=True)
class Ran:
    """What composed time needs of a run.

    Attributes
    ----------
    config : Config
        Its settings.
    workers : list of float
        Bytes that every worker has sent in the whole run.
    servers : list of float
        The same of every server.
    num_parameters : int
        Of the model.
    step_s : float
        Computation of a step, and what encoding and decoding add to it.
    """

    config: Config
    workers: list[float]
    servers: list[float]
    num_parameters: int
    step_s: float


def ran(config: Config, summary: dict[str, object], step_s: float) -> Ran:
    """Take what is needed from summary.json."""
    ranks = [float(each["sent_bytes"]) for each in cast(list[dict[str, float]], summary["per_rank"])]
    split = len(ranks) - (config.exchange.servers or 0)
    return Ran(config, ranks[:split], ranks[split:], cast(int, summary["num_parameters"]), step_s)


def composed_s(run: Ran, link: Link) -> float | None:
    """Compose the seconds of a run; None for the native collective, whose messages nobody knows."""
    exchange = run.config.exchange
    if exchange.when == "server":
        return _through_servers(run, link)
    if exchange.collective == "native":
        return None
    steps = run.config.train.steps
    exchanges = ceil(steps / exchange.h) * exchange.fragments if exchange.when == "local" else steps
    hidden_s = exchange.delay * run.step_s if exchange.when == "local" else 0.0
    one_s = _messages(run) * link.delay_s + _busiest(run) / exchanges / link.rate_bytes_s
    return steps * run.step_s + exchanges * max(0.0, one_s - hidden_s)


def _messages(run: Ran) -> int:
    """Count the messages of a sum that can only follow each other."""
    ranks = len(run.workers)
    return 2 * (ranks - 1) if run.config.exchange.collective == "ring" else 2 * min(ranks - 1 + len(run.servers), 1)


def _busiest(run: Ran) -> float:
    """Count the bytes of the busiest link: what a rank sends (it gets as many), or what a server gets and sends."""
    if run.servers:
        return sum(run.workers + run.servers) / len(run.servers)
    return max(run.workers)


def _through_servers(run: Ran, link: Link) -> float:
    """Simulate the rule of the server, whose link all workers share."""
    config, steps, workers = run.config, run.config.train.steps, len(run.workers)
    rounds = meetings(config)
    rate = link.rate_bytes_s * len(run.servers)
    refresh_bytes = run.num_parameters * RAW_BYTES
    replies = max(1, workers * (steps - len(rounds)))
    reply_bytes = max(0.0, sum(run.servers) - len(rounds) * workers * refresh_bytes) / replies
    costs = Costs(
        latency_s=link.delay_s,
        push_s=max(run.workers) / steps / rate,
        reply_s=reply_bytes / rate,
        refresh_s=refresh_bytes / rate,
    )
    step_s = [[run.step_s] * steps] * workers
    return simulate(step_s, rule_of(config.exchange), costs, rounds=rounds).makespan_s


def meetings(config: Config) -> list[int]:
    """List the clocks after which all workers meet: the rounds of local steps; with a server, evaluations and saves."""
    steps, exchange = config.train.steps, config.exchange
    if exchange.when == "sync":
        return list(range(1, steps + 1))
    every = [exchange.h] if exchange.when == "local" else [config.train.eval_every, config.checkpoint.every]
    return sorted({*(clock for number in every if number for clock in range(number, steps, number)), steps})

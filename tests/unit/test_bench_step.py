"""What `mpitrain bench step` asks for, and what it makes of its measurements."""

from types import SimpleNamespace

import pytest

from mpitrain.bench.gloo import choose_interface
from mpitrain.bench.rounds import Family, Measured, Taken, Turns, compare
from mpitrain.bench.step import Request, check_same
from mpitrain.comm.interfaces import Interface
from mpitrain.data.stations import FEATURES, PROFILES
from mpitrain.errors import ConfigError, LaunchError
from mpitrain.nn.models import Transformer


def named(name):
    return SimpleNamespace(name=name)


OURS = Family(named("alone"), [named("raw"), named("int8")])
PEERS = Family(named("torch alone"), [named("fp32"), named("fp16")])
FOUND = {
    "alone": Measured([0.1, 0.3, 0.2], 0),
    "raw": Measured([0.5, 0.6, 0.7], 4000),
    "int8": Measured([0.3, 0.25, 9.0], 1000),
    "torch alone": Measured([0.1, 0.1, 0.1]),
    "fp32": Measured([0.8, 0.9, 1.0]),
    "fp16": Measured([0.5, 0.4, 0.6]),
}


def test_records_by_hand():
    """Medians of turns in ms; exposed: the step minus the same step alone, of each product by itself."""
    records = compare("model", "dp=4 direct", OURS, PEERS, FOUND)
    assert [(record["layout"], record["peer"]) for record in records] == [
        ("dp=4 direct raw", "fp32"),
        ("dp=4 direct raw", "fp16"),
        ("dp=4 direct int8", "fp32"),
        ("dp=4 direct int8", "fp16"),
    ]
    assert records[3] == pytest.approx(
        {
            "model": "model",
            "layout": "dp=4 direct int8",
            "ms": 300.0,
            "alone_ms": 200.0,
            "exposed_ms": 100.0,
            "sent_bytes": 1000,
            "peer": "fp16",
            "peer_ms": 500.0,
            "peer_alone_ms": 100.0,
            "peer_exposed_ms": 400.0,
            "step_ratio": 5 / 3,
            "exposed_ratio": 4.0,
        }
    )


def test_records_without_peers_have_the_same_fields():
    records = compare("model", "dp=4 direct", OURS, None, FOUND)
    assert [record["layout"] for record in records] == ["dp=4 direct raw", "dp=4 direct int8"]
    assert records[0].keys() == compare("model", "dp=4 direct", OURS, PEERS, FOUND)[0].keys()
    assert {records[0][name] for name in records[0] if "peer" in name or "ratio" in name} == {None}
    assert (records[0]["ms"], records[0]["exposed_ms"]) == pytest.approx((600.0, 400.0))


def test_what_is_not_exposed_is_no_divisor():
    found = FOUND | {"int8": Measured([0.19], 1000)}
    records = compare("model", "dp=4 direct", OURS, PEERS, found)
    assert records[3]["exposed_ms"] == pytest.approx(-10.0)
    assert records[3]["exposed_ratio"] is None


def test_steps_of_a_run():
    assert Turns(rounds=7, steps=8, warm_up=2).total == 70
    ((_, resolved),) = Request(None, [], ["int8"], 7, 8).resolve(4)
    assert resolved.config.train.steps == 71


@pytest.mark.parametrize("ranks", [2, 4, 11])
def test_what_is_trained_by_default(ranks):
    """0.99 million parameters, 5 layers, d = 128, sequence 64, 8 samples a rank; a station for every rank."""
    cells = Request(None, [], ["raw", "int8:residual", "fast=fp16,optim.lr=0.5"], 1, 1).resolve(ranks)
    config = cells[0][1].config
    assert (config.model.layers, config.model.d_model, config.data.window) == (5, 128, 64)
    assert config.train.batch_size == 8 * ranks
    assert config.data.stations >= ranks
    model = Transformer(
        task=config.model.task,
        time=config.data.window,
        d_model=config.model.d_model,
        blocks=config.model.layers,
        heads=config.model.heads,
        d_ff=config.model.d_ff,
        features=len(FEATURES),
        outputs=len(PROFILES),
    )
    assert sum(spec.size for spec in model.specs()) == pytest.approx(0.99e6, rel=5e-3)
    exchanges = [(cell.name, resolved.config.exchange.codec, resolved.config.optim.lr) for cell, resolved in cells]
    assert exchanges == [("raw", "raw", 1e-3), ("int8:residual", "int8", 1e-3), ("fast", "fp16", 0.5)]


@pytest.mark.parametrize(
    ("cell", "overrides", "message"),
    [
        ("local-30/int8", [], 'exchange.when = "local"'),
        ("ssp-1/int8", [], 'exchange.when = "server"'),
        ("raw,exchange.collective=server", [], 'exchange.collective = "server"'),
        ("raw", ["parallel.tp=2"], r"parallel.pp \* parallel.tp = 1 \* 2; set both to 1"),
        ("raw", ["train.batch_size=10"], "train.batch_size = 10 is not a multiple of 4 ranks, .* set it to 8"),
        ("raw", ["train.batch_size=3"], "train.batch_size = 3 is not a multiple of 4 ranks, .* set it to 4"),
        ("int9", [], "int9"),
    ],
)
def test_what_has_no_step_without_exchange_is_refused(cell, overrides, message):
    with pytest.raises(ConfigError, match=message):
        Request(None, overrides, [cell], 1, 1).resolve(4)


def test_peers_that_compute_something_else_are_refused():
    check_same(Taken(1.0, 2.0))
    check_same(Taken(1.0, 2.0), Taken(1.0005, 1.999))
    with pytest.raises(RuntimeError, match="the loss of the first step is 1.0 here, but 1.01 by the peer"):
        check_same(Taken(1.0, 2.0), Taken(1.01, 2.0))
    with pytest.raises(RuntimeError, match="gradient norm"):
        check_same(Taken(1.0, 2.0), Taken(1.0, 2.1))


LO = Interface("lo", "127.0.0.1", up=True, loopback=True)
BRIDGE = Interface("docker0", "172.17.0.1", up=True, internal=True)
DOWN = Interface("eth0", "10.0.0.1", up=False)
FAST = Interface("eth1", "10.0.1.1", up=True)
BARE = Interface("eth2", "", up=True)


@pytest.mark.parametrize(
    ("interfaces", "environment", "one_host", "expected"),
    [
        ([LO, FAST], {}, True, LO),
        ([LO, BRIDGE, DOWN, FAST], {}, False, FAST),
        ([LO, BRIDGE], {}, False, BRIDGE),
        ([LO, BRIDGE, FAST], {"OMPI_MCA_btl_tcp_if_include": "docker0"}, False, BRIDGE),
        ([LO, BRIDGE, FAST], {"OMPI_MCA_btl_tcp_if_include": "10.0.1.0/24,eth1"}, True, FAST),
        ([LO, BRIDGE, FAST], {"OMPI_MCA_btl_tcp_if_include": "eth1", "GLOO_SOCKET_IFNAME": "docker0"}, False, BRIDGE),
    ],
)
def test_gloo_uses_the_interface_of_mpi(interfaces, environment, one_host, expected):
    assert choose_interface(one_host=one_host, interfaces=interfaces, environment=environment) == expected.address
    assert environment["GLOO_SOCKET_IFNAME"] == expected.name


@pytest.mark.parametrize(
    ("interfaces", "environment", "message"),
    [
        ([LO, FAST], {"GLOO_SOCKET_IFNAME": "wlan0"}, "expected an interface wlan0 with an address, got lo 127.0.0.1"),
        ([LO, BARE], {"GLOO_SOCKET_IFNAME": "eth2"}, "eth2 no IPv4 address"),
        ([LO], {}, "expected an interface to other hosts"),
    ],
)
def test_an_interface_that_is_not_there(interfaces, environment, message):
    with pytest.raises(LaunchError, match=message):
        choose_interface(one_host=False, interfaces=interfaces, environment=environment)

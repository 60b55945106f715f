"""Topologies as graphs: routes, trees, loops, the order of a ring, what is under way."""

import random
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.errors import ConfigError
from mpitrain.topology.describe import MAX_ROWS, bdp_bytes, describe
from mpitrain.topology.graph import check_connected, find_loop, require_tree, ring_note, ring_order, root_of
from mpitrain.topology.load import load_topology
from mpitrain.topology.model import Constant, Direction, Hop, Link, Site, Topology

FOLDER = Path(__file__).resolve().parents[2] / "jobs" / "topologies"


def shipped(name):
    return load_topology(FOLDER / f"{name}.toml")


def network(sites, *links, **kinds):
    """Make a topology of names; a site with a capital forwards only. Links are ``a-b`` or ``a-b:Mbit/s:ms``."""
    made = []
    for link in links:
        ends, *numbers = link.split(":")
        mbps, ms = map(float, numbers or (100, 5))
        way = Direction(Constant(mbps * 125_000), ms / 1000)
        made.append(Link(tuple(ends.split("-")), way, way))
    places = (Site(name, kinds.get(name, "edge"), slots=int(name.islower())) for name in sites)
    return Topology(tuple(places), tuple(made), "net")


@st.composite
def trees(draw):
    """Draw a tree of some sites, some of which forward only, with sites and links in any order."""
    size = draw(st.integers(1, 12))
    names = [f"s{number}" if draw(st.booleans()) else f"S{number}" for number in range(size)]
    names[0] = "s0"
    links = [f"{names[draw(st.integers(0, number - 1))]}-{names[number]}" for number in range(1, size)]
    return network(draw(st.permutations(names)), *draw(st.permutations(links)))


def links_of(topology, source, dest):
    return list(topology.path(source, dest).hops)


# Routes.


def test_paths_share_links():
    """Both cells of a tree climb over the same link of their aggregation site."""
    tree = shipped("tree")
    first, second = tree.path("cell0", "cell2"), tree.path("cell1", "cell3")
    assert first.hops == (Hop(0, True), Hop(4, True), Hop(5, False), Hop(2, False))
    assert set(first.hops) & set(second.hops) == {Hop(4, True), Hop(5, False)}
    assert first.alpha_s == pytest.approx(0.008)
    assert first.beta_s == 1 / 6.25e6  # up from the cell is the slowest
    assert tree.path("core", "cell0").beta_s == 1 / 12.5e6


def test_the_shorter_way_around_a_ring():
    ring = shipped("ring")
    assert links_of(ring, "cell0", "cell3") == [Hop(3, False)]
    assert len(links_of(ring, "cell0", "cell2")) == 2
    assert links_of(ring, "cell0", "cell0") == []
    assert ring.path("cell0", "cell0").alpha_s == 0


def test_unknown_and_unreachable_sites():
    topology = network("abc", "a-b")
    with pytest.raises(ConfigError, match=r"^topology net: no links lead from a to c; add one$"):
        topology.path("a", "c")
    for pair in (("a", "x"), ("x", "a")):
        with pytest.raises(ConfigError, match=r"^topology net: there is no site 'x'; it has a, b, c$"):
            topology.path(*pair)
    with pytest.raises(ConfigError, match=r"^topology net: no links lead from a to c; add some$"):
        check_connected(topology)
    eight = network([f"s{number}" for number in range(10)], "s0-s1")
    with pytest.raises(ConfigError, match=r"from s0 to s2, s3, s4, s5, s6, s7, s8, s9; add some$"):
        check_connected(eight)
    many = network([f"s{number}" for number in range(20)], "s0-s1")
    with pytest.raises(ConfigError, match=r"from s0 to s2, s3, s4, s5, s6, s7, s8, s9 and 10 more; add some$"):
        check_connected(many)


def test_more_ranks_than_slots():
    with pytest.raises(ConfigError, match=r"^topology tree: 5 ranks, but 4 slots \(cell0 1, .*, core 0\); start fewer"):
        shipped("tree").place(5)


# Trees and loops.


@pytest.mark.parametrize(
    ("links", "loop"),
    [
        (["a-b", "b-c", "c-d"], []),
        (["a-b", "b-c", "c-a"], ["c", "b", "a", "c"]),
        (["a-b", "c-d", "b-c", "d-b"], ["d", "c", "b", "d"]),
        (["a-b", "c-d", "a-c", "d-b"], ["d", "c", "a", "b", "d"]),
    ],
)
def test_loops_are_named(links, loop):
    topology = network("abcd", *links)
    assert find_loop(topology) == loop
    if not loop:
        require_tree(topology)
    elif loop == ["d", "c", "a", "b", "d"]:
        with pytest.raises(ConfigError) as caught:
            require_tree(topology)
        told = "topology net: expected a tree, got the loop d - c - a - b - d; remove one of these links"
        assert str(caught.value) == told


@given(trees(), st.randoms())
def test_a_tree_has_no_loop_and_one_more_link_makes_one(topology, chance):
    require_tree(topology)
    assert find_loop(topology) == []
    names = [site.name for site in topology.sites]
    pairs = [(a, b) for a in names for b in names if a != b and len(topology.path(a, b).hops) > 1]
    if pairs:
        one, other = chance.choice(sorted(pairs))
        more = network(names, *(link.name for link in topology.links), f"{one}-{other}")
        loop = find_loop(more)
        assert loop[0] == loop[-1]
        assert len(set(loop)) == len(loop) - 1 == len(topology.path(one, other).hops) + 1
        joined = {frozenset(link.ends) for link in more.links}
        assert all(frozenset(pair) in joined for pair in pairwise(loop))
        with pytest.raises(ConfigError, match=f"^topology net: expected a tree, got the loop {' - '.join(loop)};"):
            require_tree(more)


def test_an_unconnected_forest_is_no_tree():
    with pytest.raises(ConfigError, match="no links lead from a to c"):
        require_tree(network("abc", "a-b"))


def test_roots():
    assert root_of(shipped("tree")) == "core"
    assert root_of(shipped("chain")) == "cell1"  # the middle, of two the first
    assert root_of(network("abc", "a-b", "b-c", a="core", c="core")) == "b"
    assert root_of(network("abc", "a-b", "b-c", a="core")) == "a"


# The order of a ring.


@pytest.mark.parametrize(
    ("sites", "links", "order"),
    [
        ("abcd", ["c-a", "a-d", "d-b"], "bdac"),  # a chain, from that end which comes first among the sites
        ("abH", ["a-H", "b-H"], "ab"),
        ("acbdGH", ["a-G", "b-G", "c-H", "d-H", "G-H"], "abcd"),
        ("abcd", ["a-c", "c-b", "b-d", "d-a"], "acbd"),  # a ring
        ("abcd", ["a-b:1:5", "a-c", "a-d:50:5", "b-c", "b-d", "c-d:1:50"], "acbd"),  # slow links are spared
        ("a", [], "a"),
    ],
)
def test_ring_order(sites, links, order):
    assert "".join(site.name for site in ring_order(network(sites, *links))) == order


@given(trees())
def test_a_ring_over_a_tree_uses_no_link_twice_in_one_direction(topology):
    """So it is as short as any: whatever the order, each link between sites with slots is crossed there and back."""
    order = [site.name for site in ring_order(topology)]
    assert sorted(order) == sorted(site.name for site in topology.sites if site.slots)
    hops = [hop for one, other in pairwise([*order, order[0]]) for hop in topology.path(one, other).hops]
    assert len(hops) == len(set(hops))


def test_a_ring_over_shipped_networks():
    for name in ("ring", "chain", "mesh", "tree"):
        assert [site.name for site in ring_order(shipped(name))] == ["cell0", "cell1", "cell2", "cell3"]


def test_a_shuffled_mesh_keeps_to_fast_pairs():
    """Two groups of four, fast inside, slow between: the ring crosses between them twice."""
    names = [f"{group}{number}" for number in range(4) for group in "ab"]
    pairs = [(one, other) for place, one in enumerate(names) for other in names[place + 1 :]]
    random.Random(0).shuffle(pairs)
    links = [f"{one}-{other}" + ("" if one[0] == other[0] else ":1:50") for one, other in pairs]
    order = [site.name[0] for site in ring_order(network(names, *links))]
    assert sum(one != other for one, other in pairwise([*order, order[0]])) == 2


def test_a_better_order_is_named():
    """The chain c - a - d - b in the order of its names: 10 + 15 + 10 + 5 ms instead of 5 + 5 + 5 + 15."""
    chain = network("abcd", "c-a", "a-d", "d-b")
    note = "net: once around the ring takes 40 ms; with the sites in the order b, d, a, c, 30 ms"
    assert ring_note(chain, 4) == note
    assert ring_note(chain, 3) == "", "three sites have one order"
    for name in ("ring", "chain", "mesh", "tree", "star"):
        assert ring_note(shipped(name), 4) == "", name


# What is under way, and the tables.


@pytest.mark.parametrize(
    ("name", "ranks", "expected"),
    [("star", 4, 250_000), ("star", 5, 250_000), ("star", 1, 0), ("star-slow", 4, 100_000), ("tree", 4, 100_000)],
)
def test_bytes_under_way(name, ranks, expected):
    assert bdp_bytes(shipped(name), ranks) == expected


def test_bytes_under_way_count_the_ranks_that_run():
    topology = network("abc", "a-b", "b-c:1000:100")
    assert bdp_bytes(topology, 2) == 125_000
    assert bdp_bytes(topology, 3) == 25_000_000  # from b to c; from a there is more delay, but only 100 Mbit/s
    with pytest.raises(ConfigError, match="4 ranks, but 3 slots"):
        bdp_bytes(topology, 4)


def test_ranks_of_one_site_have_nothing_under_way():
    assert bdp_bytes(Topology((Site("desk", slots=4),), ()), 4) == 0


def test_description_of_a_star():
    lines = describe(shipped("star"))
    assert lines[0] == "topology star: 5 sites, 5 slots, 4 links, a tree below core; packets of 9000 bytes"
    assert "cell0  cell      1      1" in lines
    assert "cell0-core        100   100      5     5" in lines
    assert "cell0 -> cell1      2          10     100           250" in lines
    assert sum(" -> " in line for line in lines) == 20
    assert all(line == line.rstrip() for line in lines)


def test_description_of_what_varies():
    lines = "\n".join(describe(shipped("mobile")))
    assert "varies (5g-driving), jitter 1.06 ms, 0.545 % lost, out from 120 to 150 s" in lines
    assert "with loops" in describe(shipped("ring"))[0]


def test_description_tells_directions_that_differ():
    up, down = Direction(Constant(1e6), 0.001, loss=0.01), Direction(Constant(1e6), 0.002, duplicate=0.02)
    topology = Topology((Site("a"), Site("b", slots=0)), (Link(("a", "b"), up, down, ((3, float("inf")),)),))
    (line,) = [line for line in describe(topology) if line.startswith("a-b")]
    assert line.endswith("up 1 % lost, down 2 % twice, out from 3 to inf s")


def test_long_tables_are_cut():
    names = [f"s{number}" for number in range(60)]
    lines = describe(network(names, *(f"{one}-{other}" for one, other in pairwise(names))))
    assert [line for line in lines if line.startswith("…")] == ["… and 20 more", "… and 19 more", "… and 3500 more"]
    assert len(lines) == 3 * (MAX_ROWS + 3) + 3

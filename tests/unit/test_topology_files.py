"""Topology files: what the shipped ones say, whose key counts, what is refused and how it is told."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.errors import ConfigError
from mpitrain.topology.dump import dump_topology
from mpitrain.topology.load import load_topology
from mpitrain.topology.model import Constant, Direction, Link, Site, Topology
from mpitrain.topology.rates import Trace

FOLDER = Path(__file__).resolve().parents[2] / "jobs" / "topologies"
SHIPPED = sorted(path.stem for path in FOLDER.glob("*.toml"))
SITES = '[[site]]\nname = "a"\n[[site]]\nname = "b"\n'
LINK = '[[link]]\nbetween = ["a", "b"]\nrate_mbps = 8\ndelay_ms = 5\n'


def load(folder, text, name="net.toml"):
    (folder / name).write_text(text, encoding="utf-8")
    return load_topology(folder / name)


def refusal(folder, text):
    """Return the message that a file is refused with, without the name of the file."""
    with pytest.raises(ConfigError) as caught:
        load(folder, text)
    origin = f"topology {folder / 'net.toml'}: "
    assert str(caught.value).startswith(origin)
    return str(caught.value).removeprefix(origin)


def link_with(keys, defaults=""):
    return f'{defaults}{SITES}[[link]]\nbetween = ["a", "b"]\n{keys}'


# What is shipped.


def test_shipped_files_are_those_of_the_documentation():
    assert SHIPPED == ["chain", "mesh", "mobile", "ring", "star", "star-slow", "tree"]


@pytest.mark.parametrize(
    ("name", "links", "slots", "alpha_ms", "mbps"),
    [
        ("star", 4, [1, 1, 1, 1, 1], 10, 100),
        ("star-slow", 4, [1, 1, 1, 1, 1], 20, 20),
        ("ring", 4, [1, 1, 1, 1], 5, 100),
        ("chain", 3, [1, 1, 1, 1], 5, 100),
        ("mesh", 6, [1, 1, 1, 1], 5, 100),
        ("tree", 6, [1, 1, 1, 1, 0, 0, 0], 4, 50),
    ],
)
def test_shipped_networks(name, links, slots, alpha_ms, mbps):
    topology = load_topology(FOLDER / f"{name}.toml")
    assert topology.name == name
    assert topology.source == str(FOLDER / f"{name}.toml")
    assert topology.mtu == 9000
    assert len(topology.links) == links
    assert [site.slots for site in topology.sites] == slots
    assert [site.name for site in topology.place(4)] == ["cell0", "cell1", "cell2", "cell3"]
    path = topology.path("cell0", "cell1")
    assert path.alpha_s == pytest.approx(alpha_ms / 1000)
    assert path.beta_s == pytest.approx(8e-6 / mbps)


def test_the_hub_of_a_star_comes_last():
    for name in ("star", "star-slow"):
        assert load_topology(FOLDER / f"{name}.toml").sites[-1].name == "core"


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_files_survive_a_round_trip(name, tmp_path):
    topology = load_topology(FOLDER / f"{name}.toml")
    again = load(tmp_path, dump_topology(topology), f"{name}.toml")
    assert replace(again, source=topology.source) == topology


# What a file says.


def test_units_and_defaults(tmp_path):
    topology = load(tmp_path, f'seed = 3\n{SITES}host = "10.0.0.2"\nslots = 2\nspeed = 2\nkind = "cell"\n{LINK}')
    assert topology.sites == (Site("a"), Site("b", "cell", 2, 2.0, "10.0.0.2"))
    way = Direction(Constant(1e6), 0.005, queue_bytes=200_000)
    assert topology.links == (Link(("a", "b"), way, way),)
    assert (topology.name, topology.seed, topology.mtu) == ("net", 3, 1500)


def test_all_numbers_of_a_link(tmp_path):
    keys = (
        "up_mbps = 80\ndown_mbps = 400\ndelay_ms = 7\nup_delay_ms = 2\njitter_ms = 0.5\nloss_pct = 1\n"
        "duplicate_pct = 2\nreorder_pct = 3\ndown_reorder_pct = 4\nqueue_ms = 1000\n"
        "outages_s = [[30, 60], [60, 61.5], [100, inf]]\n"
    )
    (link,) = load(tmp_path, link_with(keys)).links
    assert link.up == Direction(Constant(1e7), 0.002, 0.0005, 0.01, 0.02, 0.03, 10_000_000)
    assert link.down == Direction(Constant(5e7), 0.007, 0.0005, 0.01, 0.02, 0.04, 50_000_000)
    assert link.outages == ((30, 60), (60, 61.5), (100, float("inf")))


@pytest.mark.parametrize(
    ("own", "default", "up", "down"),
    [
        ("", "rate_mbps = 8", 8, 8),
        ("up_mbps = 4", "rate_mbps = 8", 4, 8),
        ("rate_mbps = 4", "up_mbps = 8\ndown_mbps = 8", 4, 4),
        ("rate_mbps = 4\nup_mbps = 2", "down_mbps = 8", 2, 4),
        ('profile = "4g-nordic"', "rate_mbps = 8", 10.6, 27.1),
        ('profile = "4g-nordic"\nup_mbps = 2', "rate_mbps = 8", 2, 27.1),
        ("rate_mbps = 4", 'profile = "4g-nordic"', 4, 4),
        ("up_mbps = 4", 'profile = "4g-nordic"', 4, 27.1),
        ("", 'profile = "4g-nordic"\ndown_mbps = 8', 10.6, 8),
        ('profile = "3g-nordic"', 'profile = "4g-nordic"', 2.7, 13.2),
    ],
)
def test_whose_key_counts(tmp_path, own, default, up, down):
    """Own keys, own profile, keys of [defaults], profile of [defaults]; the direction before both."""
    (link,) = load(tmp_path, link_with(f"delay_ms = 1\n{own}\n", f"[defaults]\n{default}\n")).links
    assert link.up.rate == Constant(up * 125_000)
    assert link.down.rate == Constant(down * 125_000)


def test_outages_of_a_link_replace_those_of_all(tmp_path):
    for own, expected in (("", ((1, 2),)), ("outages_s = []", ()), ("outages_s = [[5, 6]]", ((5, 6),))):
        keys = f"rate_mbps = 1\ndelay_ms = 1\n{own}\n"
        (link,) = load(tmp_path, link_with(keys, "[defaults]\noutages_s = [[1, 2]]\n")).links
        assert link.outages == expected


def test_what_a_profile_says(tmp_path):
    (link,) = load(tmp_path, link_with('profile = "5g-driving"\n')).links
    for way in (link.up, link.down):
        assert isinstance(way.rate, Trace)
        assert way.rate.profile == "5g-driving"
        assert (way.delay_s, way.loss) == (0.037, 0.00545)
        assert way.jitter_s == pytest.approx(0.0015 / 2**0.5)


@pytest.mark.parametrize(
    ("head", "mbps", "mtu"),
    [("", 10, 9000), ("", 9.999, 1500), ("mtu = 9000\n", 1, 9000), ("mtu = 1500\n", 100, 1500)],
)
def test_packets_are_small_on_slow_links(tmp_path, head, mbps, mtu):
    topology = load(tmp_path, f"{head}{link_with(f'up_mbps = {mbps}{chr(10)}down_mbps = 50{chr(10)}delay_ms = 1')}")
    assert topology.mtu == mtu


def test_a_queue_holds_32_packets_at_least(tmp_path):
    (link,) = load(tmp_path, link_with("up_mbps = 0.1\ndown_mbps = 100\ndelay_ms = 1\n")).links
    assert (link.up.queue_bytes, link.down.queue_bytes) == (32 * 1500, 2_500_000)


def test_one_site_needs_no_link(tmp_path):
    topology = load(tmp_path, '[[site]]\nname = "desk"\nslots = 4\n')
    assert topology.slots == 4
    assert topology.links == ()


@pytest.mark.parametrize(("mark", "end"), [(b"\xef\xbb\xbf", "\n"), (b"", "\r\n")])
def test_files_of_other_systems(tmp_path, mark, end):
    """A mark of the byte order; lines that end with CR LF."""
    data = mark + (SITES + LINK).replace("\n", end).encode()
    (tmp_path / "net.toml").write_bytes(data)
    assert load_topology(str(tmp_path / "net.toml")).links[0].up.delay_s == 0.005


# What is refused.


def test_a_loop_where_a_tree_is_needed(tmp_path):
    third = '[[site]]\nname = "c"\n'
    links, loop = LINK + LINK.replace('"a"', '"c"'), LINK.replace('"b"', '"c"')
    assert len(load(tmp_path, f"tree = true\n{SITES}{third}{links}").links) == 2
    assert len(load(tmp_path, f"{SITES}{third}{links}{loop}").links) == 3
    with pytest.raises(ConfigError, match="^topology net: expected a tree, got the loop a - b - c - a; remove one of"):
        load(tmp_path, f"tree = true\n{SITES}{third}{links}{loop}")
    assert refusal(tmp_path, f"tree = 1\n{SITES}") == "tree: expected true or false, got 1"


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("rate_mbps", "0", "expected a number >= 0.001, got 0"),
        ("rate_mbps", "-5", "expected a number >= 0.001, got -5"),
        ("rate_mbps", "nan", "expected a number >= 0.001, got nan"),
        ("rate_mbps", "inf", "expected a number <= 1000000.0, got inf"),
        ("rate_mbps", "1e9", "expected a number <= 1000000.0, got 1000000000.0"),
        ("rate_mbps", '"fast"', "expected a number, got 'fast'"),
        ("rate_mbps", '"100"', "expected a number, got '100'"),
        ("rate_mbps", "true", "expected a number, got True"),
        ("rate_mbps", "[1]", "expected a number, got [1]"),
        ("up_mbps", "0", "expected a number >= 0.001, got 0"),
        ("down_mbps", "-1", "expected a number >= 0.001, got -1"),
        ("delay_ms", "-1", "expected a number >= 0.0, got -1"),
        ("delay_ms", "nan", "expected a number >= 0.0, got nan"),
        ("delay_ms", "1e7", "expected a number <= 3600000.0, got 10000000.0"),
        ("jitter_ms", "-0.1", "expected a number >= 0.0, got -0.1"),
        ("loss_pct", "100", "expected a number < 100.0, got 100"),
        ("loss_pct", "-1", "expected a number >= 0.0, got -1"),
        ("duplicate_pct", "nan", "expected a number >= 0.0, got nan"),
        ("reorder_pct", "101", "expected a number < 100.0, got 101"),
        ("queue_ms", "0", "expected a number > 0.0, got 0"),
        ("outages_s", "[[30]]", "expected a list of length 2, got [30]"),
        ("outages_s", "[30, 60]", "expected a list, got 30"),
    ],
)
def test_numbers_of_links(tmp_path, key, value, expected):
    where = f"{key}[0]" if key == "outages_s" else key
    assert refusal(tmp_path, link_with(f"{key} = {value}\n")) == f"link 1 (a-b): {where}: {expected}"
    told = refusal(tmp_path, f"[defaults]\n{key} = {value}\n{SITES}")
    assert told == f"defaults: {where}: {expected}"


@pytest.mark.parametrize(
    ("outages", "expected"),
    [
        ("[[60, 30]]", "expected [from, to] with from < to, got [60, 30]"),
        ("[[30, 30]]", "expected [from, to] with from < to, got [30, 30]"),
        ("[[inf, inf]]", "expected [from, to] with from < to, got [inf, inf]"),
        (
            "[[30, 60], [50, 70]]",
            "expected outages one after the other, but [50, 70] begins before 60, when the last one ends; "
            "sort and join them",
        ),
        (
            "[[30, inf], [50, 70]]",
            "expected outages one after the other, but [50, 70] begins before inf, when the last one ends; "
            "sort and join them",
        ),
    ],
)
def test_outages(tmp_path, outages, expected):
    told = refusal(tmp_path, link_with(f"rate_mbps = 1\ndelay_ms = 1\noutages_s = {outages}\n"))
    assert told == f"link 1 (a-b): outages_s: {expected}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rate_mbps = 1\n" + SITES, "unknown key 'rate_mbps'; mpitrain reference topology lists the keys"),
        ("sead = 1\n" + SITES, "unknown key 'sead'; did you mean seed?"),
        ("[[sites]]\n", "unknown key 'sites'; did you mean between or [[site]]?"),
        ("[defaults]\ndelay = 1\n" + SITES, "[defaults] unknown key 'delay'; did you mean delay_ms?"),
        ('[defaults]\nbetween = ["a", "b"]\n' + SITES, "[defaults] unknown key 'between'"),
        (SITES + "slot = 2\n", "site 2 (b): unknown key 'slot'; did you mean slots?"),
        (SITES + "ranks = 2\n", "site 2 (b): unknown key 'ranks'; did you mean slots?"),
        (SITES + LINK + "bandwidth = 2\n", "link 1 (a-b): unknown key 'bandwidth'; did you mean rate_mbps?"),
        (SITES + LINK + "up-mbps = 2\n", "link 1 (a-b): unknown key 'up-mbps'; did you mean up_mbps?"),
        (
            SITES + LINK + "rtt_ms = 2\n",
            "link 1 (a-b): unknown key 'rtt_ms'; did you mean delay_ms, one way: half of it?",
        ),
        (SITES + LINK + "zzz = 2\n", "link 1 (a-b): unknown key 'zzz'; mpitrain reference topology lists the keys"),
    ],
)
def test_unknown_keys(tmp_path, text, expected):
    assert refusal(tmp_path, text).startswith(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "expected the key site"),
        ("site = []", "expected 1 to 4096 [[site]] tables, got 0"),
        ("site = 3", "site: expected tables, each under [[site]], got 3"),
        ("[site]\nname = 'a'", "site: expected tables, each under [[site]], got {'name': 'a'}"),
        ("defaults = 3\n" + SITES, "defaults: expected a table, [defaults], got 3"),
        ("[[site]]\nslots = 1", "site 1: expected the key name, got {'slots': 1}"),
        ("[[site]]\nname = 7", "site 1 (7): name: expected text, got 7"),
        ('[[site]]\nname = "a"\nslots = -1', "site 1 (a): slots: expected a whole number >= 0, got -1"),
        ('[[site]]\nname = "a"\nslots = 1.5', "site 1 (a): slots: expected a whole number, got 1.5"),
        ('[[site]]\nname = "a"\nslots = 1000000', "site 1 (a): slots: expected a whole number <= 4096, got 1000000"),
        (
            '[[site]]\nname = "a"\nslots = 0',
            "no site has slots, so no rank has a place; set slots of one to 1 or more",
        ),
        ('[[site]]\nname = "a"\nspeed = 0', "site 1 (a): speed: expected a number >= 0.001, got 0"),
        ('[[site]]\nname = "a"\nspeed = nan', "site 1 (a): speed: expected a number >= 0.001, got nan"),
        ("mtu = 100\n" + SITES, "mtu: expected a whole number >= 576, got 100"),
        ("mtu = 70000\n" + SITES, "mtu: expected a whole number <= 65000, got 70000"),
        ("seed = -1\n" + SITES, "seed: expected a whole number >= 0, got -1"),
        (f"seed = 1{'0' * 30}\n" + SITES, "seed: expected an integer of at most 63 bits and a sign, got 100"),
        ('name = ""\n' + SITES, "name: expected text of length >= 1, got ''"),
        (
            SITES + '[[site]]\nname = "A"',
            "site 3 (A): name: site 1 has it, too (host names ignore case); choose another one",
        ),
        (
            '[[site]]\nname = "a"\nhost = "-oProxyCommand=x"',
            "site 1 (a): host: expected a host name or an IP address, got '-oProxyCommand=x'",
        ),
        (SITES, "no links lead from a to b; add some"),
        (SITES + '[[site]]\nname = "c"\n' + LINK, "no links lead from a to c; add some"),
        (SITES + LINK.replace('"b"', '"a"'), "link 1 (a-a): between: expected two sites, got a twice"),
        (SITES + LINK + LINK, "link 2 (a-b): between: link 1 joins the same sites; leave one of them out"),
        (
            SITES + LINK + LINK.replace('"a", "b"', '"b", "a"'),
            "link 2 (b-a): between: link 1 joins the same sites; leave one of them out",
        ),
        (
            '[[site]]\nname = "cell0"\n[[link]]\nbetween = ["cell0", "cel0"]',
            "link 1 (cell0-cel0): between: there is no site 'cel0'; did you mean cell0?",
        ),
        (
            SITES + LINK.replace('"b"', '"zone"'),
            "link 1 (a-zone): between: there is no site 'zone'; add [[site]] name = 'zone'",
        ),
        (SITES + LINK.replace('"b"', '"b", "c"'), "link 1 (a-b-c): between: expected a list of length 2"),
        (SITES + "[[link]]\nrate_mbps = 1", "link 1: expected the key between, got {'rate_mbps': 1}"),
    ],
)
def test_sites_and_ends(tmp_path, text, expected):
    told = refusal(tmp_path, text) if "no links lead" not in expected else None
    if told is None:
        with pytest.raises(ConfigError, match="^topology net: ") as caught:
            load(tmp_path, text)
        told = str(caught.value).removeprefix("topology net: ")
    assert told.startswith(expected)


def test_one_host_for_several_sites(tmp_path):
    """Neighbours may share a host, as may sites without ranks; not those that others stand between."""
    mesh = '\n[[link]]\nbetween = ["a", "b"]\n[[link]]\nbetween = ["a", "c"]\n[defaults]\nrate_mbps = 1\ndelay_ms = 1\n'
    parts = ('[[site]]\nname = "a"\nhost = "n1"\n', '[[site]]\nname = "b"\n', '[[site]]\nname = "c"\nhost = "N1"\n')
    sites = load(tmp_path, parts[0] + parts[2] + parts[1] + mesh).sites
    assert [site.host for site in sites] == ["n1", "N1", ""]
    assert load(tmp_path, parts[0] + parts[1] + "slots = 0\n" + parts[2] + mesh).slots == 2
    assert refusal(tmp_path, "".join(parts) + mesh) == (
        "site c: host: n1 is also that of a, with others in between; move them together, or give one of them all slots"
    )
    unnamed = parts[1] + parts[0] + parts[2].replace("N1", "b") + mesh
    assert refusal(tmp_path, unnamed).startswith("site c: host: b is also that of b, with")


@pytest.mark.parametrize(
    "name", ["", "two words", "-a", "a-", "a.b", "a_b", "ä", "7", "0x1f", "localhost", "a\\nb", "a/b", "x" * 49, "$(x)"]
)
def test_site_names_that_are_no_host_names(tmp_path, name):
    told = refusal(tmp_path, f'[[site]]\nname = "{name}"\n')
    assert "name: expected" in told


def test_site_names_that_are_host_names(tmp_path):
    for name in ("a", "5g-east", "Cell0", "x" * 48, "cafe"):
        assert load(tmp_path, f'[[site]]\nname = "{name}"\n').sites[0].name == name


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("delay_ms = 1", "no rate of direction up; set rate_mbps, up_mbps or trace_up"),
        ("delay_ms = 1\nup_mbps = 1", "no rate of direction down; set rate_mbps, down_mbps or trace_down"),
        ("rate_mbps = 1", "no delay of direction up; set delay_ms (0 for none)"),
        ("rate_mbps = 1\nup_delay_ms = 1", "no delay of direction down; set delay_ms (0 for none)"),
        (
            'profile = "lte-driving"',
            "no rate of direction up; profile lte-driving has none; set rate_mbps, up_mbps or trace_up",
        ),
        (
            'profile = "lte-verizon-us"',
            "no delay of direction up; profile lte-verizon-us has none; set delay_ms (0 for none)",
        ),
        (
            "rate_mbps = 1\nup_mbps = 2\ndown_mbps = 3\ndelay_ms = 1",
            "rate_mbps counts for neither direction beside up_mbps and down_mbps; leave it out",
        ),
        (
            "rate_mbps = 1\ndelay_ms = 1\nup_delay_ms = 1\ndown_delay_ms = 1",
            "delay_ms counts for neither direction beside up_delay_ms and down_delay_ms; leave it out",
        ),
        (
            'up_mbps = 1\ntrace_up = "t"\ndown_mbps = 1\ndelay_ms = 1',
            "up_mbps and trace_up both say the rate; leave one of them out",
        ),
    ],
)
def test_rates_and_delays(tmp_path, keys, expected):
    assert refusal(tmp_path, link_with(f"{keys}\n")) == f"link 1 (a-b): {expected}"


def test_an_unknown_profile(tmp_path):
    told = refusal(tmp_path, link_with('profile = "5g-drivin"\n'))
    assert told.startswith("link 1 (a-b): profile: expected one of 5g-static, 5g-driving, lte-driving, ")
    assert told.endswith("got '5g-drivin'; did you mean 5g-driving?")


def test_a_message_names_the_table_of_defaults(tmp_path):
    told = refusal(tmp_path, link_with("", '[defaults]\nup_mbps = 1\ntrace_up = "t"\n'))
    assert told == "link 1 (a-b): [defaults]: up_mbps and trace_up both say the rate; leave one of them out"


def test_trace_of_a_link(tmp_path):
    (tmp_path / "up.csv").write_text("time_s,mbps\n0,8\n1,16\n")
    (link,) = load(tmp_path, link_with('trace_up = "up.csv"\ndown_mbps = 20\ndelay_ms = 1\n')).links
    assert link.up.rate == Trace((0, 1), (1e6, 2e6), 2, file=str(tmp_path / "up.csv"))
    told = refusal(tmp_path, link_with('trace_up = "none.csv"\ndown_mbps = 20\ndelay_ms = 1\n'))
    assert told == f"link 1 (a-b): trace_up: trace {tmp_path / 'none.csv'}: cannot be read: No such file or directory"


def test_files_that_are_none(tmp_path):
    for path, reason in (
        (tmp_path / "none.toml", "cannot be read: No such file or directory"),
        (tmp_path, "cannot be read: Is a directory"),
        (Path("a\0b"), "cannot be read: embedded null byte"),
        (Path("/dev/zero"), "expected at most 16,000,000 characters, got more"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_topology(path)
        assert str(caught.value).endswith(f": {reason}")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\x89HDF\r\n\x1a\n\xff\xfe", "expected UTF-8 text, got other bytes (invalid start byte)"),
        ((SITES + LINK).encode("utf-16"), "expected UTF-8 text, got other bytes (invalid start byte)"),
        (b"a = 1\0", "expected text, got NUL characters"),
        (b"a = ", "is not TOML: Invalid value (at end of document)"),
        (b"name = 'x'\nname = 'y'\n", "is not TOML: Cannot overwrite a value (at line 2, column 11)"),
        (b"x = " + b"[" * 10_000, "is not TOML: brackets or dotted keys are nested too deeply"),
        (b"cells,rate\n1,2\n", "is not TOML: Expected '=' after a key in a key/value pair (at line 1, column 6)"),
    ],
)
def test_files_that_are_no_toml(tmp_path, data, expected):
    (tmp_path / "net.toml").write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        load_topology(tmp_path / "net.toml")
    assert str(caught.value) == f"topology {tmp_path / 'net.toml'}: {expected}"


def test_too_many_sites(tmp_path):
    text = "".join(f'[[site]]\nname = "s{number}"\n' for number in range(4097))
    assert refusal(tmp_path, text) == "expected 1 to 4096 [[site]] tables, got 4097"


# Back to a file.

numbers = st.floats(0, 99, allow_subnormal=False)
rates = st.one_of(st.integers(1, 10**6).map(float), st.floats(1e-3, 1e6))
directions = st.builds(
    lambda mbps, ms, shares, queue_ms: Direction(
        Constant(mbps * 125_000),
        ms[0] / 1000,
        ms[1] / 1000,
        *(share / 100 for share in shares),
        max(round(mbps * 125 * queue_ms), 32 * 9000),
    ),
    rates,
    st.tuples(numbers, numbers),
    st.tuples(numbers, numbers, numbers),
    numbers,
)


@settings(max_examples=40, deadline=None)
@given(directions, directions, st.booleans(), st.sampled_from([(), ((1.5, 2.0), (3.0, float("inf")))]))
def test_round_trip(tmp_path_factory, up, down, equal, outages):
    """Whatever a file can say comes back as the same number, equal directions as one key."""
    sites = (Site("a", "cell", 3, 0.25, "n-1.example"), Site("b", slots=0))
    link = Link(("a", "b"), up, up if equal else down, outages)
    topology = Topology(sites, (link,), 'with "quotes" and \\', 7, 9000)
    text = dump_topology(topology)
    again = load(tmp_path_factory.mktemp("round"), text)
    assert replace(again, source="") == topology
    assert ("rate_mbps" in text) == (topology.links[0].up.rate == topology.links[0].down.rate)


def test_traces_are_named_by_their_path(tmp_path):
    os.makedirs(tmp_path / "deep er" / "traces")
    (tmp_path / "deep er" / "traces" / "up").write_text("5\n10\n")
    topology = load(tmp_path / "deep er", link_with('trace_up = "traces/up"\ndown_mbps = 20\ndelay_ms = 1\n'))
    again = load(tmp_path, dump_topology(topology))
    assert again.links == topology.links


def test_one_direction_of_a_profile_survives(tmp_path):
    topology = load(tmp_path, link_with('profile = "lte-driving"\nup_mbps = 7\n'))
    assert load(tmp_path, dump_topology(topology)).links == topology.links


def test_an_unset_queue_becomes_the_usual_one(tmp_path):
    way = Direction(Constant(12.5e6), 0.01)
    topology = Topology((Site("a"), Site("b")), (Link(("a", "b"), way, way),))
    assert load(tmp_path, dump_topology(topology)).links[0].up == replace(way, queue_bytes=2_500_000)


def test_rates_that_no_file_tells():
    rate = Trace((0.0,), (1.0,), 1.0)
    one, other = (replace(rate, profile=name) for name in ("5g-static", "5g-driving"))
    for up, down, expected in (
        (rate, rate, "link a-b: the up rate comes from no file or profile, so no key can tell it"),
        (one, other, 'link a-b: a file has one profile a link, got "5g-driving" and "5g-static"'),
    ):
        topology = Topology((Site("a"), Site("b")), (Link(("a", "b"), Direction(up, 0), Direction(down, 0)),))
        with pytest.raises(ConfigError) as caught:
            dump_topology(topology)
        assert str(caught.value) == expected

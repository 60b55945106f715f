"""From a TOML file to a checked topology."""

import difflib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from mpitrain.config.plain import Tree, parse_toml, printable, refuse_odd_values, shown
from mpitrain.errors import ConfigError
from mpitrain.topology.files import read_text
from mpitrain.topology.graph import check_connected, require_tree
from mpitrain.topology.links import default_mtu, read_link, with_smallest_queues
from mpitrain.topology.model import Site, Topology
from mpitrain.topology.schema import MAX_LINKS, MAX_SITES, LinkTable, SiteTable, TopologyTable
from mpitrain.topology.unknown import refuse_unknown, told

MAX_CHARACTERS = 16_000_000

KINDS = {
    "bool": "true or false",
    "float": "a number",
    "int": "a whole number",
    "str": "text",
    "array": "a list",
    "object": "a table",
}
"""Types as messages call them."""

HOST_NAME = re.compile(r"(?!\d+$|0[xX]|localhost$)[A-Za-z0-9]([A-Za-z0-9-]{0,46}[A-Za-z0-9])?")
"""No more than 48 characters, so that a prefix fits; numbers alone are read as addresses by resolvers."""

ADDRESS = re.compile(r"[A-Za-z0-9:][A-Za-z0-9._:%-]*")
"""Host name or IP address; what begins with a hyphen would be an option."""


def load_topology(path: Path | str) -> Topology:
    """Read and check a topology.

    Parameters
    ----------
    path : Path or str
        TOML file; ``mpitrain reference topology`` tells its keys. Traces are relative to it.

    Raises
    ------
    ConfigError
        Unreadable file or trace, unknown key, wrong type or range, names that are used twice or that nothing has,
        a site that no links lead to, a loop where ``tree`` is set.
    """
    path = Path(path)
    origin = f"topology {printable(str(path))}"
    tree = _read(path, origin)
    refuse_odd_values(tree, "", origin)
    refuse_unknown(tree, origin)
    table = _convert(tree, origin)
    sites = _sites(table.site, origin)
    numbered = list(enumerate(table.link, 1))
    _check_ends(numbered, [site.name for site in sites], origin)
    folder, defaults = path.absolute().parent, table.defaults
    links = [read_link(link, defaults, table.seed, folder, _where(origin, number, link)) for number, link in numbered]
    mtu = table.mtu or default_mtu(links)
    links = [with_smallest_queues(link, mtu) for link in links]
    topology = Topology(sites, tuple(links), printable(table.name or path.stem), table.seed, mtu, str(path))
    (require_tree if table.tree else check_connected)(topology)
    return topology


def _read(path: Path, origin: str) -> Tree:
    text = read_text(path, MAX_CHARACTERS, origin)
    try:
        return parse_toml(text)
    except ValueError as error:
        raise ConfigError(f"{origin}: is not TOML: {printable(str(error))}") from None


def _convert(tree: Tree, origin: str) -> TopologyTable:
    try:
        return msgspec.convert(tree, TopologyTable)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at ")
        parts = re.findall(r"\w+", where)
        node: object = tree
        words: list[str] = []
        for part in parts:
            if isinstance(node, dict):
                node = node.get(part)
                words.append(part)
            elif isinstance(node, list):
                node = node[int(part)]
                key = words[-1]
                words[-1] = told(key, int(part) + 1, node) if isinstance(node, dict) else f"{key}[{part}]"
        expected = message[0].lower() + message[1:].partition(", got")[0].replace(" | null", "")
        expected = expected.replace("object missing required field", "expected the key")
        expected = re.sub("`(.*?)`", lambda kind: KINDS.get(kind[1], kind[1]), expected)
        where = ": ".join([origin, *words])
        raise ConfigError(f"{where}: {expected}" + (f", got {shown(node)}" if parts else "")) from None


def _sites(tables: Iterable[SiteTable], origin: str) -> tuple[Site, ...]:
    """Check the names of sites, and that ranks have a place."""
    sites = tuple(Site(table.name, table.kind, table.slots, table.speed, table.host) for table in tables)
    if not 1 <= len(sites) <= MAX_SITES:
        raise ConfigError(f"{origin}: expected 1 to {MAX_SITES} [[site]] tables, got {len(sites)}")
    names: dict[str, int] = {}
    for number, site in enumerate(sites, 1):
        where = f"{origin}: site {number} ({printable(site.name)})"
        if not HOST_NAME.fullmatch(site.name):
            raise ConfigError(
                f"{where}: name: expected a host name (at most 48 letters, digits and hyphens, no number, "
                f"not localhost), got {shown(site.name)}"
            )
        if earlier := names.get(site.name.lower()):
            raise ConfigError(f"{where}: name: site {earlier} has it, too (host names ignore case); choose another one")
        if site.host and not ADDRESS.fullmatch(site.host):
            raise ConfigError(f"{where}: host: expected a host name or an IP address, got {shown(site.host)}")
        names[site.name.lower()] = number
    if not any(site.slots for site in sites):
        raise ConfigError(f"{origin}: no site has slots, so no rank has a place; set slots of one to 1 or more")
    _check_hosts([site for site in sites if site.slots], origin)
    return sites


def _check_hosts(ranked: Sequence[Site], origin: str) -> None:
    """Refuse a host that comes again after another one: launchers fill a host once, and ranks would be elsewhere."""
    homes: dict[str, str] = {}
    last = ""
    for site in ranked:
        host = (site.host or site.name).lower()
        if host in homes and host != last:
            raise ConfigError(
                f"{origin}: site {site.name}: host: {host} is also that of {homes[host]}, with others in between; "
                "move them together, or give one of them all slots"
            )
        homes[host] = site.name
        last = host


def _check_ends(links: Sequence[tuple[int, LinkTable]], names: list[str], origin: str) -> None:
    """Check that links join two known sites each, and no two the same ones."""
    if len(links) > MAX_LINKS:
        raise ConfigError(f"{origin}: expected at most {MAX_LINKS} [[link]] tables, got {len(links)}")
    earlier: dict[frozenset[str], int] = {}
    known = set(names)
    for number, link in links:
        where = f"{_where(origin, number, link)}: between"
        for end in link.between:
            if end not in known:
                raise ConfigError(f"{where}: there is no site {shown(end)}{_meant(end, names)}")
        pair = frozenset(link.between)
        if len(pair) == 1:
            raise ConfigError(f"{where}: expected two sites, got {link.between[0]} twice")
        if pair in earlier:
            raise ConfigError(f"{where}: link {earlier[pair]} joins the same sites; leave one of them out")
        earlier[pair] = number


def _where(origin: str, number: int, link: LinkTable) -> str:
    return f"{origin}: link {number} ({printable('-'.join(link.between))})"


def _meant(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, 1)
    return f"; did you mean {near[0]}?" if near else f"; add [[site]] name = {shown(name)}"

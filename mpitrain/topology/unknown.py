"""Keys that a topology does not have: which one was meant."""

import difflib

from msgspec import structs

from mpitrain.config.plain import Tree, printable, shown
from mpitrain.errors import ConfigError
from mpitrain.topology.schema import LinkKeys, LinkTable, SiteTable, TopologyTable

ALIASES = {
    "bandwidth": "rate_mbps",
    "bandwidth_mbps": "rate_mbps",
    "rate": "rate_mbps",
    "mbps": "rate_mbps",
    "upload_mbps": "up_mbps",
    "download_mbps": "down_mbps",
    "latency": "delay_ms",
    "latency_ms": "delay_ms",
    "delay": "delay_ms",
    "rtt_ms": "delay_ms, one way: half of it",
    "loss": "loss_pct",
    "trace": "trace_up or trace_down",
    "ends": "between",
    "sites": "between or [[site]]",
    "nodes": "[[site]]",
    "node": "[[site]]",
    "stations": "[[site]]",
    "links": "[[link]]",
    "edge": "[[link]]",
    "edges": "[[link]]",
    "ranks": "slots",
    "address": "host",
    "hostname": "host",
    "outages": "outages_s",
    "outage_s": "outages_s",
}
"""Names that other programs give to these keys: what a user is likely to try."""


def refuse_unknown(tree: Tree, origin: str) -> None:
    """Refuse keys that are not in the schema, with the one that was meant.

    Raises
    ------
    ConfigError
        The first such key, or a table that is none.
    """
    _refuse(tree, TopologyTable, "", origin)
    defaults = tree.get("defaults", {})
    if not isinstance(defaults, dict):
        raise ConfigError(f"{origin}: defaults: expected a table, [defaults], got {shown(defaults)}")
    _refuse(defaults, LinkKeys, "[defaults] ", origin)
    for key, kind in (("site", SiteTable), ("link", LinkTable)):
        tables = tree.get(key, [])
        if not (isinstance(tables, list) and all(isinstance(table, dict) for table in tables)):
            raise ConfigError(f"{origin}: {key}: expected tables, each under [[{key}]], got {shown(tables)}")
        for number, table in enumerate(tables, 1):
            _refuse(table, kind, f"{told(key, number, table)}: ", origin)


def told(key: str, number: int, table: Tree) -> str:
    """Name a table for a message: by its place in the file, counted from 1, and its name."""
    ends = table.get("between")
    name = "-".join(str(end) for end in ends) if isinstance(ends, list) else table.get("name", "")
    return f"{key} {number}" + (f" ({printable(str(name))})" if name else "")


def _refuse(table: Tree, kind: type, where: str, origin: str) -> None:
    known = [field.name for field in structs.fields(kind)]
    for key in table:
        if key not in known:
            word = key.replace("-", "_").lower()
            near = difflib.get_close_matches(word, known, 1)
            meant = ALIASES.get(word) or (near[0] if near else "")
            hint = f"did you mean {meant}?" if meant else "mpitrain reference topology lists the keys"
            raise ConfigError(f"{origin}: {where}unknown key {shown(key)}; {hint}")

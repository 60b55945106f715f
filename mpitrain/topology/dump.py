"""From a topology back to a file that loads to the same numbers."""

import math
from collections.abc import Callable

from mpitrain.config.load import toml_value
from mpitrain.errors import ConfigError
from mpitrain.topology.model import Constant, Direction, Link, Topology
from mpitrain.topology.rates import BYTES_S, Trace


def dump_topology(topology: Topology) -> str:
    """Render a topology as TOML; every number is written, so it needs no defaults.

    It loads to the same numbers where they are multiples of what a file can say (rates of 10^-3 bit/s or so); others
    to the nearest. A queue of 0 bytes is left out, so that it becomes the usual one. Traces are named by their path.

    Raises
    ------
    ConfigError
        A link whose rate changes in a way that no file or profile tells, or with two profiles.
    """
    lines = [f"name = {toml_value(topology.name)}", f"seed = {topology.seed}", f"mtu = {topology.mtu}"]
    for site in topology.sites:
        lines += ["", "[[site]]", f"name = {toml_value(site.name)}", f"kind = {toml_value(site.kind)}"]
        lines += [f"slots = {site.slots}", f"speed = {toml_value(float(site.speed))}"]
        lines += [f"host = {toml_value(site.host)}"] * bool(site.host)
    for link in topology.links:
        lines += ["", "[[link]]", f"between = {toml_value(link.ends)}", *_link_lines(link)]
    return "\n".join(lines) + "\n"


def _link_lines(link: Link) -> list[str]:
    """Render both directions, equal numbers once."""
    up, down = _direction_keys("up", link.up, link), _direction_keys("down", link.down, link)
    profiles = {keys.pop("profile") for keys in (up, down) if "profile" in keys}
    if len(profiles) > 1:
        raise ConfigError(f"link {link.name}: a file has one profile a link, got {' and '.join(sorted(profiles))}")
    lines = [f"profile = {name}" for name in profiles]
    for name, value in up.items():
        if not name.startswith("trace") and down.get(name) == value:
            lines.append(f"{'rate_' if name == 'mbps' else ''}{name} = {value}")
        else:
            lines.append(f"{_key(name, 'up')} = {value}")
            lines += [f"{_key(name, 'down')} = {down[name]}"] if name in down else []
    lines += [f"{_key(name, 'down')} = {value}" for name, value in down.items() if name not in up]
    return lines + [f"outages_s = {toml_value(link.outages)}"] * bool(link.outages)


def _key(name: str, way: str) -> str:
    return f"trace_{way}" if name == "trace" else f"{way}_{name}"


def _direction_keys(way: str, direction: Direction, link: Link) -> dict[str, str]:
    """Render the numbers of a direction under the names that they have in a file."""
    rate, keys = direction.rate, {}
    if isinstance(rate, Constant):
        keys["mbps"] = _number(rate.bytes_s, lambda mbps: mbps * BYTES_S, 1 / BYTES_S)
    elif isinstance(rate, Trace) and rate.profile:
        keys["profile"] = toml_value(rate.profile)
    elif isinstance(rate, Trace) and rate.file:
        keys["trace"] = toml_value(rate.file)
    else:
        raise ConfigError(f"link {link.name}: the {way} rate comes from no file or profile, so no key can tell it")
    for name in ("delay", "jitter"):
        keys[f"{name}_ms"] = _number(getattr(direction, f"{name}_s"), lambda ms: ms / 1000, 1000)
    for name in ("loss", "duplicate", "reorder"):
        keys[f"{name}_pct"] = _number(getattr(direction, name), lambda percent: percent / 100, 100)
    if direction.queue_bytes:
        mean = rate.mean_bytes_s
        keys["queue_ms"] = _number(direction.queue_bytes, lambda ms: round(mean * ms / 1000), 1000 / mean)
    return keys


def _number(value: float, reading: Callable[[float], float], factor: float) -> str:
    """Find the shortest number that a file reads as a value; the nearest one where none does exactly."""
    exact = value * factor
    short = [float(f"{exact:.{digits}g}") for digits in range(1, 18)]
    # The product is rounded, so that the number that was once read may be the next one.
    nearby = [math.nextafter(exact, end) for end in (0.0, math.inf)]
    return repr(next((number for number in [*short, *nearby] if reading(number) == value), exact))

"""What a benchmark compares: a *cell* is a name with settings, written short.

=====================  =========================================================================================
cell                   means
=====================  =========================================================================================
``WHAT``               ``sync/WHAT``
``sync/WHAT``          gradients at every step, by ``exchange.collective``
``local-H/WHAT``       changes of weights after ``H`` steps
``server-sync/WHAT``   gradients to a server, the change of the weights back; all workers in step
``ssp-S/WHAT``         the same, a worker may be ``S`` steps ahead
``async/WHAT``         the same, every gradient is an update
``async-dc/WHAT``      the same, late gradients corrected; ``async-dca`` with the adaptive strength
=====================  =========================================================================================

``WHAT`` is ``CODEC``, ``CODEC:MEMORY``, or either with ``+SERVER_CODEC``. Any ``section.key=value`` may follow, or
stand alone, separated by commas; ``NAME=`` in front gives another name to it all::

    ecq-2.5   local-30/int4   ssp-4/int8:delta+fp16   async/int8,optim.lr_scale=sqrt   sgd=sync/raw,optim.kind=sgd
"""

import re
from dataclasses import dataclass

from mpitrain.errors import ConfigError

MODES = {
    r"sync": "exchange.when=sync",
    r"local-(\d+)": "exchange.when=local exchange.h={}",
    r"server-sync": "exchange.when=server exchange.mode=sync",
    r"ssp-(\d+)": "exchange.when=server exchange.mode=ssp exchange.staleness={}",
    r"async": "exchange.when=server exchange.mode=async exchange.delay_compensation=none",
    r"async-dc": "exchange.when=server exchange.mode=async exchange.delay_compensation=fixed",
    r"async-dca": "exchange.when=server exchange.mode=async exchange.delay_compensation=adaptive",
}
"""Settings of every mode, by the pattern of its name."""

CODEC_FORM = r"[\w.-]+"
"""Of the name of a codec, with its parameter: what the configuration will check."""

NAMES = "sync, local-H, server-sync, ssp-S, async, async-dc, async-dca"


@dataclass(frozen=True)
class Cell:
    """A line of a table.

    Attributes
    ----------
    name : str
        As the table shows it.
    overrides : tuple of str
        ``section.key=value``.
    """

    name: str
    overrides: tuple[str, ...]

    @property
    def folder(self) -> str:
        """Name for a folder: nothing in it needs quoting."""
        return re.sub(r"[^\w.+=-]+", "-", self.name)


def parse_cell(text: str) -> Cell:
    """Read a cell.

    Raises
    ------
    ConfigError
        It is not of the form above.
    """
    named = re.match(r"([^=,./]+)=(?=.)", text)
    name, body = (named[1], text[named.end() :]) if named else (text, text)
    first, *rest = body.split(",")
    overrides = (*([first] if "=" in first else _exchange(first, text)), *rest)
    for item in overrides:
        if not re.fullmatch(r"\w+\.\w+=.+", item):
            raise ConfigError(f"bench: --cell {text}: expected section.key=value, got {item!r}")
    return Cell(name, overrides)


def parse_cells(texts: list[str]) -> list[Cell]:
    """Read cells; raises ConfigError also where two would share a name or a folder."""
    cells = [parse_cell(text) for text in texts]
    for index, cell in enumerate(cells):
        for other in cells[:index]:
            if cell.folder == other.folder:
                raise ConfigError(
                    f"bench: --cell {cell.name} is there twice; give one of them a name (NAME={cell.name})"
                )
    return cells


def _exchange(short: str, text: str) -> list[str]:
    when, slash, what = short.rpartition("/")
    mode = _mode(when if slash else "sync", text)
    form = re.fullmatch(rf"(?P<codec>{CODEC_FORM})(:(?P<memory>\w+))?(\+(?P<server>{CODEC_FORM}))?", what)
    if form is None:
        raise ConfigError(f"bench: --cell {text}: expected CODEC[:MEMORY][+SERVER_CODEC], got {what!r}")
    memory = form["memory"] or ("none" if form["codec"] == "raw" else "residual")
    settings = [*mode.split(), f"exchange.codec={form['codec']}", f"exchange.memory={memory}"]
    if form["server"] and "exchange.when=server" not in settings:
        raise ConfigError(f"bench: --cell {text}: {when or 'sync'} has no server whose codec could be {form['server']}")
    return settings + [f"exchange.server_codec={form['server']}"] * bool(form["server"])


def _mode(when: str, text: str) -> str:
    for pattern, settings in MODES.items():
        if found := re.fullmatch(pattern, when):
            return settings.format(*found.groups())
    raise ConfigError(f"bench: --cell {text}: expected one of {NAMES} in front of the slash, got {when!r}")

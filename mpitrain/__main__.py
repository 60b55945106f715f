"""``python -m mpitrain``."""

from mpitrain.cli.main import run

run()

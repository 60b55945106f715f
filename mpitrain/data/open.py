"""From the configuration to a data set."""

from mpitrain.config.schema import DataConfig, Task
from mpitrain.data.dataset import Dataset
from mpitrain.data.stations import open_stations
from mpitrain.data.text import open_text
from mpitrain.data.windows import open_windows


def open_dataset(config: DataConfig, task: Task, seed: int) -> Dataset:
    """Open the configured data set; its samples come into memory with `Dataset.load`.

    Every rank opens the same and gets the same verdict.

    Raises
    ------
    DataError
        What is wrong with the data, and the remedy.
    """
    if config.kind == "windows":
        return open_windows(config, task)
    if config.kind == "text":
        return open_text(config)
    return open_stations(config, task, seed)

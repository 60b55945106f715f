"""``mpitrain eval``."""

import json
from pathlib import Path
from typing import cast

from mpitrain.comm.agreement import agree
from mpitrain.comm.grid import Axis
from mpitrain.comm.outputs import check_output, write_output
from mpitrain.comm.runtime import Position, fail, finish, start
from mpitrain.train.runfolder import RunFolder
from mpitrain.train.scoring import score_run


def main(run: Path, overrides: list[str], *, step: int | None, output: Path | None) -> int:
    """Score a run on all ranks of the world; every way out has its documented code."""
    try:
        world = start()
        agree(
            Axis(world, "world"), lambda: check_output(output, "--json") if output and world.Get_rank() == 0 else None
        )
        result = score_run(RunFolder(run), world, overrides, step=step)
        if world.Get_rank() == 0:
            metric = cast(dict[str, object], result["metric"])
            scores = f"{metric['name']} {metric['value']:.4f}, test_loss {result['loss']:.4f}"
            print(f"{run} at step {result['step']}: {scores}, {result['num_test']:,} test samples", flush=True)
            if output:
                write_output(output, json.dumps(result, indent=1) + "\n", "--json")
        finish()
    except BaseException as error:  # whatever it is, no rank may be left waiting
        fail(error, Position())
    return 0

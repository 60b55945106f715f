"""A script that starts a run on this machine, on its emulated hosts, or on the hosts of a topology."""

from mpitrain.errors import ExitCode
from mpitrain.jobs.job import Job
from mpitrain.jobs.shell import REFUSE, array, comment, options, path_text, quote, refuse, verbatim


def workstation_script(job: Job) -> str:
    """Write the script: `mpitrain launch` with what this machine needs, from a checkpoint where there is one."""
    parts = [_header(job), _folder(job), _environment(), _start(job)]
    return "\n".join(line for part in parts for line in part) + "\n"


def _header(job: Job) -> list[str]:
    where = "hosts that are emulated on this machine" if job.emulate else "the hosts of a topology"
    where = where if job.topology else "this machine"
    ranks = [*comment("Where the ranks run:"), "#", *verbatim(job.table()), "#"] if job.topology else []
    return [
        "#!/usr/bin/env bash",
        *comment(f"Trains {job.config} on {job.ranks} ranks of {where}: {job.shape}."),
        "#",
        *verbatim([f"bash {quote(path_text(job.script))} [options of mpitrain launch, such as --set train.steps=50]"]),
        "#",
        *comment(
            f"Code {ExitCode.STOPPED}, after Ctrl-C or a time limit: stopped with a checkpoint. The same command goes "
            "on with the run. Lines that you may have to change have a comment. Written by:"
        ),
        "#",
        *verbatim([job.command]),
        "#",
        *ranks,
        "set -euo pipefail",
        REFUSE,
        "",
    ]


def _folder(job: Job) -> list[str]:
    missing = "there is no $file; correct the path"
    return [
        *comment("Paths are relative to this folder:"),
        f"cd -- {job.folder} || exit {ExitCode.CONFIG}",
        f"config={quote(path_text(job.config))}",
        f"python={quote(path_text(job.python))}",
        'for file in "$config" "$python"; do',
        f'    [ -e "$file" ] || {refuse(missing, ExitCode.CONFIG)}',
        "done",
        "",
    ]


def _environment() -> list[str]:
    return [
        *comment("Threads of a rank's linear algebra: ranks times threads should not be more than the cores."),
        "export OMP_NUM_THREADS=1",
        "",
    ]


def _start(job: Job) -> list[str]:
    """Write what `mpitrain launch` gets."""
    words = ["launch", '"$config"', f"-n {job.ranks}", "--resume", "auto"]
    words += ["--topology", quote(path_text(job.topology))] * bool(job.topology)
    words += ["--emulate"] * job.emulate
    words += ["--interface", quote(job.interface)] * bool(job.interface)
    for name, value in job.variables.items():
        words += ["--env", quote(f"{name}={value}")]
    words += options([f"run.time_limit_s={job.wall_s}"] if job.wall_s else [])
    lines = array("launch", [*words, *options(job.overrides)])
    if not job.topology:
        lines += [*comment("More ranks than cores may share this machine:"), "launch+=(--oversubscribe)"]
    return [
        *lines,
        *comment("Open MPI refuses root unless it is told; in containers that is who runs this."),
        'if [ "$(id -u)" = 0 ]; then launch+=(--allow-root); fi',
        "",
        'exec "$python" -m mpitrain "${launch[@]}" "$@"',
    ]

"""A batch script for Slurm: what it asks for, how the ranks start, and how the job goes back into the queue."""

import json

from mpitrain.errors import ExitCode
from mpitrain.jobs.job import Job, describe_nodes
from mpitrain.jobs.shell import array, assignment, comment, path, quote, refuse, verbatim
from mpitrain.jobs.wall import format_time

SIGNALLED = 128 + 10
"""Exit code of a launcher that SIGUSR1 met before it was listening."""


def slurm_script(job: Job, name: str) -> str:
    """Write the script.

    Parameters
    ----------
    job : Job
        What to start.
    name : str
        Of the file, for the line that says how to submit it.
    """
    parts = [
        _header(job, name),
        _directives(job),
        _folder(job),
        _environment(job),
        _settings(job),
        _nodes(job),
        _start(job),
        _requeue(),
    ]
    return "\n".join(line for part in parts for line in part) + "\n"


def _header(job: Job, name: str) -> list[str]:
    lines = [
        "#!/usr/bin/env bash",
        *comment(f"Trains {job.config} on {job.ranks} ranks under Slurm: {job.shape}."),
        "#",
        *verbatim([f"sbatch {path(name)} [options of mpitrain train, such as --set train.steps=50]"]),
        "#",
        *comment(f"Written by: {job.command}"),
        *comment("Lines that you may have to change have a comment."),
        "#",
        *verbatim(describe_nodes(job.nodes, job.shape)),
        "#",
    ]
    return lines


def _directives(job: Job) -> list[str]:
    """Write what sbatch reads, up to the first command."""
    log = "%A-%a" if job.points else "%j"
    lines = [
        f"#SBATCH --job-name={job.name}",
        *comment("Your account and queue, and the memory of a rank, where the cluster wants them said:"),
        "##SBATCH --account=…",
        "##SBATCH --partition=…",
        "##SBATCH --mem-per-cpu=…",
        *comment("Machines, and the ranks on each:"),
        f"#SBATCH --nodes={len(job.nodes)}",
        f"#SBATCH --ntasks-per-node={job.per_node}",
    ]
    if not job.chooses_nodes:
        lines.append(f"#SBATCH --ntasks={job.ranks}")
    if job.nodes[0].host:
        lines.append(f"#SBATCH --nodelist={','.join(node.host for node in job.nodes)}")
    lines += [
        *comment("Processors of a rank, and with them its threads:"),
        "#SBATCH --cpus-per-task=1",
        *comment("The longest that a start may take; a run that is not complete by then goes on in the next one:"),
        f"#SBATCH --time={format_time(job.wall_s)}",
        *comment(
            "So many seconds before its end the ranks are told to save and stop: more than twice their longest step and "
            "save, and Slurm may be a minute early:"
        ),
        f"#SBATCH --signal=B:USR1@{job.warning_s}",
        *comment("Back into the queue after preemption and failures of a node; the log of all starts is one:"),
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        f"#SBATCH --output={job.name}-{log}.log",
    ]
    if job.points:
        lines += [
            *comment("A task for each choice of settings (%4 behind it: four at a time):"),
            f"#SBATCH --array=0-{len(job.points) - 1}",
        ]
    return [*lines, "set -uo pipefail", ""]


def _folder(job: Job) -> list[str]:
    missing = "there is no $file; submit this from the folder that it was written for, or correct the path above"
    return [
        *comment("Paths are relative to the folder from which this is submitted; all nodes must see them."),
        f"cd -- \"${{SLURM_SUBMIT_DIR:-.}}\" || exit {ExitCode.MPI}",
        assignment("config", path_text(job.config)),
        assignment("python", job.python),
        *([] if job.srun else [assignment("mpirun", job.mpirun)]),
        f'for file in "$config" "$python"{"" if job.srun else " \"$mpirun\""}; do',
        f'    [ -e "$file" ] || {refuse(missing, ExitCode.CONFIG)}',
        "done",
        *comment("Modules of the cluster, where Python or MPI come from them:"),
        "# module load …",
        "",
    ]


def path_text(text: str) -> str:
    """Keep a path from being taken for an option."""
    return f"./{text}" if text.startswith("-") else text


def _environment(job: Job) -> list[str]:
    """Write the environment of the ranks; what is set already wins, except threads, which --cpus-per-task rules."""
    lines = [
        *comment("Threads of a rank's linear algebra: as many as --cpus-per-task."),
        "export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}",
        *comment("Machine code of the kernels: compiled once on every node, on a disk of its own."),
        'export NUMBA_CACHE_DIR="${NUMBA_CACHE_DIR:-${TMPDIR:-/tmp}/mpitrain-kernels-$UID}"',
        *(f"export {name}={quote(value)}" for name, value in job.variables.items()),
    ]
    if job.transport:
        lines += comment(f"MPI's transport{f': {job.reason}' * bool(job.reason)}. What you set yourself stays.")
        lines += [f'export {name}="${{{name}:-{value}}}"' for name, value in job.transport.items()]
    if job.interface:
        lines += comment("The interface that reaches the other nodes must exist on each of them:")
        there = "there is no interface $interface on $(hostname); it has $(cd /sys/class/net && echo *)"
        lines += [
            assignment("interface", job.interface),
            f'[ -e "/sys/class/net/$interface" ] || {refuse(there, ExitCode.MPI)}',
        ]
    return [*lines, ""]


def _settings(job: Job) -> list[str]:
    """Write the options of training: those of all starts, and those of a task of the array."""
    common = [part for item in job.overrides for part in ("--set", item)]
    lines = array("settings", common) if common else ["settings=()"]
    if not job.points:
        return [*lines, ""]
    folder = json.dumps(job.run_folder, ensure_ascii=False)[1:-1]
    lines += [
        *comment("What each task of the array trains with, in a run folder of its own: a task that starts again goes on."),
        "task=${SLURM_ARRAY_TASK_ID:?this is an array: submit it with sbatch}",
        'case "$task" in',
    ]
    for number, point in enumerate(job.points):
        words = " ".join(quote(part) for item in point for part in ("--set", item))
        lines.append(f"    {number}) point=({words}) ;;")
    unknown = "task $task of the array has no settings here; they end with that of task " + str(len(job.points) - 1)
    return [
        *lines,
        f"    *) {refuse(unknown, ExitCode.CONFIG)} ;;",
        "esac",
        assignment("folder", folder),
        'point+=(--set "run.folder=\\"$folder/task-$task\\"")',
        "",
    ]


def _nodes(job: Job) -> list[str]:
    """Write how many ranks go where."""
    if not job.chooses_nodes:
        few = "$ranks ranks on $slots slots: ask for more tasks (--nodes, --ntasks-per-node), or start fewer ranks"
        return [
            *comment("As many ranks as tasks; the grid follows, or is refused where the configuration fixes another."),
            "ranks=${SLURM_NTASKS:-$((SLURM_JOB_NUM_NODES * SLURM_NTASKS_PER_NODE))}",
            "slots=$((SLURM_JOB_NUM_NODES * ${SLURM_NTASKS_PER_NODE:-ranks}))",
            f'[ "$ranks" -le "$slots" ] || {refuse(few, ExitCode.MPI)}',
            "",
        ]
    return [
        *comment("Ranks of each node, in the order of the topology:"),
        f"slots=({' '.join(str(node.ranks) for node in job.nodes)})",
        f"ranks={job.ranks}",
        *_named_nodes(job),
        "",
    ]


def _named_nodes(job: Job) -> list[str]:
    few = "${#nodes[@]} nodes, but the topology has ${#slots[@]} sites with ranks: ask for as many (--nodes)"
    if job.nodes[0].host:
        lines = array("nodes", [node.host for node in job.nodes])
    else:
        lines = ['mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")']
    return [
        *lines,
        f'[ "${{#nodes[@]}}" -ge "${{#slots[@]}}" ] || {refuse(few, ExitCode.MPI)}',
        "hosts=",
        'for i in "${!slots[@]}"; do hosts+="${hosts:+,}${nodes[i]}:${slots[i]}"; done',
    ]


def _start(job: Job) -> list[str]:
    options = '"$config" --resume auto "${settings[@]}" "$@"' + ' "${point[@]}"' * bool(job.points)
    told = "start $((${SLURM_RESTART_COUNT:-0} + 1)) of job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, $(date -u +%FT%TZ)"
    return [
        f'echo "{told}"',
        *(_srun(job) if job.srun else _mpirun(job)),
        *comment("In the background, since bash handles signals only between commands; each wish to stop goes on to the ranks."),
        f'"${{launch[@]}}" "$python" -m mpitrain train {options} &',
        "job=$! asked=",
        "trap 'asked=yes; kill -USR1 \"$job\"' USR1 TERM INT",
        'while kill -0 "$job" 2>/dev/null; do',
        '    wait "$job" # a signal ends the wait, not the job',
        "done",
        'wait "$job"',
        "code=$?",
        "trap - USR1 TERM INT",
        "",
    ]


def _mpirun(job: Job) -> list[str]:
    names = ["OMP_NUM_THREADS", "NUMBA_CACHE_DIR", *job.variables]
    if not job.open_mpi:
        where = '-hosts "$hosts"' if job.chooses_nodes else f"-ppn {job.per_node}"
        return [f'launch=("$mpirun" -n "$ranks" {where})']
    where = ' --host "$hosts"' if job.chooses_nodes else ""
    return [
        *comment(
            "Ranks that follow each other, such as those of a replica, fill a node before the next. Slurm binds them to "
            "the processors of the job; Open MPI must not bind them once more."
        ),
        f'launch=("$mpirun" -n "$ranks"{where} --map-by slot --bind-to none)',
        *comment("Variables that Open MPI would not hand on to other nodes:"),
        f"launch+=({' '.join(f'-x {name}' for name in names)})",
    ]


def _srun(job: Job) -> list[str]:
    kind = "pmix" if job.open_mpi else "pmi2"
    missing = f"Slurm has no {kind} plugin here (srun --mpi=list): every process would be alone; write this script anew "
    missing += "without --launcher srun"
    lines = [
        f"srun --mpi=list 2>&1 | grep -qw {kind} || {refuse(missing, ExitCode.MPI)}",
        f'launch=(srun --mpi={kind} --ntasks="$ranks" --cpus-per-task="$OMP_NUM_THREADS" --kill-on-bad-exit=1)',
    ]
    if not job.chooses_nodes:
        return [*lines, "launch+=(--distribution=block)"]
    return [
        *lines,
        *comment("A line a rank, for srun to follow:"),
        'SLURM_HOSTFILE="${TMPDIR:-/tmp}/mpitrain-hosts-$SLURM_JOB_ID"',
        "export SLURM_HOSTFILE",
        "trap 'rm -f -- \"$SLURM_HOSTFILE\"' EXIT",
        'for i in "${!slots[@]}"; do for ((k = 0; k < slots[i]; k++)); do echo "${nodes[i]}"; done; done >"$SLURM_HOSTFILE"',
        "launch+=(--distribution=arbitrary)",
    ]


def _requeue() -> list[str]:
    lost = "warning: this job could not be put back into the queue; submit it again, it goes on from its checkpoint"
    return [
        *comment(f"Code {ExitCode.STOPPED}: stopped with a checkpoint, start again. Any other is the job's own."),
        f'if [ -n "$asked" ] && [ "$code" -eq {SIGNALLED} ]; then code={ExitCode.STOPPED}; fi # it was not yet listening',
        f'if [ "$code" -eq {ExitCode.STOPPED} ]; then',
        "    if command -v scontrol >/dev/null; then",
        '        scontrol requeue "$SLURM_JOB_ID" && exit 0',
        "    fi",
        f'    echo "{lost}" >&2',
        "fi",
        'exit "$code"',
    ]

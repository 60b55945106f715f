"""A batch script for Slurm: what it asks for, how the ranks start, and how the job goes back into the queue."""

import json

from mpitrain.errors import ExitCode
from mpitrain.jobs.job import Job
from mpitrain.jobs.shell import REFUSE, array, assignment, comment, options, path_text, quote, refuse, verbatim
from mpitrain.jobs.wall import format_time

SIGNALLED = 128 + 10
"""Exit code of a launcher that SIGUSR1 met before it was listening."""


def slurm_script(job: Job) -> str:
    """Write the script; every line that a user may have to change has a comment."""
    parts = [
        _header(job),
        _directives(job),
        _folder(job),
        _environment(job),
        _settings(job),
        _nodes(job),
        _start(job),
        _requeue(),
    ]
    return "\n".join(line for part in parts for line in part) + "\n"


def _header(job: Job) -> list[str]:
    return [
        "#!/usr/bin/env bash",
        *comment(f"Trains {job.config} under Slurm on {job.ranks} ranks: {job.shape}."),
        "#",
        *verbatim([f"sbatch {quote(path_text(job.script))} [options of mpitrain train, such as --set train.steps=50]"]),
        "#",
        *comment("Lines that you may have to change have a comment. Written by:"),
        "#",
        *verbatim([job.command]),
        "#",
        *comment("Where the ranks run, a node a line:"),
        "#",
        *verbatim(job.table()),
        "#",
    ]


def _directives(job: Job) -> list[str]:
    """Write what sbatch reads, up to the first command."""
    log = "%A-%a" if job.points else "%j"
    return [
        f"#SBATCH --job-name={job.name}",
        *comment("Your account and queue, and the memory of a rank, where the cluster wants them said:"),
        "##SBATCH --account=…",
        "##SBATCH --partition=…",
        "##SBATCH --mem-per-cpu=…",
        *_machines(job),
        *comment("Processors of a rank, and with them its threads:"),
        "#SBATCH --cpus-per-task=1",
        *comment("The longest that a start may take; a run that is not complete by then goes on in the next one:"),
        f"#SBATCH --time={format_time(job.wall_s)}",
        *comment(
            "So many seconds before its end the ranks are told to save and stop: enough for the step under way and for "
            "a save; Slurm may be a minute early:"
        ),
        f"#SBATCH --signal=B:USR1@{job.warning_s}",
        *comment("Back into the queue after preemption and failures of a node; one log for all starts:"),
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        f"#SBATCH --output={job.name}-{log}.log",
        *_array(job),
        "set -uo pipefail",
        REFUSE,
        "",
    ]


def _machines(job: Job) -> list[str]:
    lines = [
        *comment("Machines, and the ranks on each:"),
        f"#SBATCH --nodes={len(job.slots)}",
        f"#SBATCH --ntasks-per-node={job.per_node}",
    ]
    if not job.chooses_nodes:
        lines.append(f"#SBATCH --ntasks={job.ranks}")
    if job.has_hosts:
        lines.append(f"#SBATCH --nodelist={','.join(job.hosts)}")
    return lines


def _array(job: Job) -> list[str]:
    if not job.points:
        return []
    return [
        *comment("A task for each choice of settings; with %4 behind it, four at a time:"),
        f"#SBATCH --array=0-{len(job.points) - 1}",
    ]


def _folder(job: Job) -> list[str]:
    missing = "there is no $file; submit this from the folder that it was written for, or correct the path"
    files = {"config": job.config, "python": job.python} | ({} if job.srun else {"mpirun": job.mpirun})
    listed = " ".join(f'"${name}"' for name in files)
    return [
        *comment("Paths are relative to the folder from which this is submitted. All nodes must see them:"),
        f'cd -- "${{SLURM_SUBMIT_DIR:-.}}" || exit {ExitCode.MPI}',
        *(assignment(name, path_text(file)) for name, file in files.items()),
        f"for file in {listed}; do",
        f'    [ -e "$file" ] || {refuse(missing, ExitCode.CONFIG)}',
        "done",
        *comment("Modules of the cluster, where Python or MPI come from them:"),
        "# module load …",
        "",
    ]


def _environment(job: Job) -> list[str]:
    """Write the environment of the ranks; what is set already wins, except threads, which --cpus-per-task rules."""
    return [
        *comment("Threads of a rank's linear algebra: as many as --cpus-per-task says."),
        'export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"',
        *comment("Machine code of the kernels: compiled once on every node, and kept on a disk of its own."),
        'export NUMBA_CACHE_DIR="${NUMBA_CACHE_DIR:-${TMPDIR:-/tmp}/mpitrain-kernels-$UID}"',
        *(f"export {name}={quote(value)}" for name, value in job.variables.items()),
        *_transport(job),
        "",
    ]


def _transport(job: Job) -> list[str]:
    lines = []
    if job.interface:
        there = "there is no interface $interface on $(hostname); it has $(echo /sys/class/net/*)"
        lines += [
            *comment("The network interface that reaches the other nodes, on each of them:"),
            assignment("interface", job.interface),
            f'[ -e "/sys/class/net/$interface" ] || {refuse(there, ExitCode.MPI)}',
        ]
    if job.transport:
        lines += comment(
            f"How MPI sends{f', {job.reason}' * bool(job.reason)}. What you have set yourself stays. Without the lines "
            "of pml and btl, Open MPI looks for faster fabrics than shared memory and TCP, too:"
        )
        lines += [f'export {name}="${{{name}:-{value}}}"' for name, value in job.transport.items()]
    return lines


def _settings(job: Job) -> list[str]:
    """Write the settings of a task of the array; an array starts with one folder a task."""
    if not job.points:
        return []
    last = len(job.points) - 1
    unknown = f"expected a task of the array from 0 to {last}, got SLURM_ARRAY_TASK_ID='$task'; start it with sbatch"
    return [
        *comment("What each task trains with, in a run folder of its own, so that a task that starts again goes on."),
        'task="${SLURM_ARRAY_TASK_ID:-}"',
        'case "$task" in',
        *(f"    {number}) point=({' '.join(options(point))}) ;;" for number, point in enumerate(job.points)),
        f"    *) {refuse(unknown, ExitCode.CONFIG)} ;;",
        "esac",
        assignment("folder", json.dumps(job.run_folder, ensure_ascii=False)[1:-1]),
        'point+=(--set "run.folder=\\"$folder/task-$task\\"")',
        "",
    ]


def _nodes(job: Job) -> list[str]:
    """Write how many ranks go where."""
    if not job.chooses_nodes:
        few = "$ranks ranks, but $slots slots: ask for more (--nodes, --ntasks-per-node), or start fewer ranks"
        return [
            *comment("As many ranks as tasks; the grid follows from them, unless the configuration fixes it."),
            'nodes="${SLURM_JOB_NUM_NODES:-${SLURM_NNODES:-1}}"',
            'ranks="${SLURM_NTASKS:-$((nodes * ${SLURM_NTASKS_PER_NODE:-1}))}"',
            'slots="$((nodes * ${SLURM_NTASKS_PER_NODE:-ranks}))"',
            f'[ "$ranks" -le "$slots" ] || {refuse(few, ExitCode.MPI)}',
            "",
        ]
    few = "${#nodes[@]} nodes, but ${#slots[@]} sites have ranks: ask for as many (--nodes)"
    listed = array("nodes", [quote(host) for host in job.hosts])
    asked = ['mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")']
    return [
        *comment("Ranks of each node, in the order of the topology:"),
        f"slots=({' '.join(map(str, job.slots))})",
        f"ranks={job.ranks}",
        *(listed if job.has_hosts else asked),
        f'[ "${{#nodes[@]}}" -ge "${{#slots[@]}}" ] || {refuse(few, ExitCode.MPI)}',
        "",
    ]


def _start(job: Job) -> list[str]:
    job_id, nodes = "${SLURM_JOB_ID:-none}", "${SLURM_JOB_NODELIST:-this host}"
    told = f"start $((${{SLURM_RESTART_COUNT:-0}} + 1)) of job {job_id} on {nodes}, $(date -u +%FT%TZ)"
    words = ["train", '"$config"', "--resume", "auto", *options(job.overrides), '"$@"']
    words += ['"${point[@]}"'] * bool(job.points)
    return [
        f'echo "{told}"',
        *(_srun(job) if job.srun else _mpirun(job)),
        *array("train", words),
        *comment("In the background: bash heeds signals only between commands. Wishes to stop go on to the ranks."),
        "job='' asked=''",
        'trap \'asked=yes; [ -n "$job" ] && kill -USR1 "$job"\' USR1 TERM INT',
        '"${launch[@]}" "$python" -m mpitrain "${train[@]}" &',
        "job=$!",
        '[ -n "$asked" ] && kill -USR1 "$job"',
        'while kill -0 "$job" 2>/dev/null; do',
        '    wait "$job" # a signal ends the wait, not the job',
        "done",
        'wait "$job"',
        "code=$?",
        "trap - USR1 TERM INT",
        "",
    ]


def _mpirun(job: Job) -> list[str]:
    hosts = [
        "hosts=",
        'for i in "${!slots[@]}"; do hosts+="${hosts:+,}${nodes[i]}:${slots[i]}"; done',
    ] * job.chooses_nodes
    if not job.open_mpi:
        where = '-hosts "$hosts"' if job.chooses_nodes else f"-ppn {job.per_node}"
        return [*hosts, f'launch=("$mpirun" -n "$ranks" {where})']
    where = ' --host "$hosts"' if job.chooses_nodes else ""
    names = ["OMP_NUM_THREADS", "NUMBA_CACHE_DIR", *job.variables]
    return [
        *hosts,
        *comment(
            "By slot: ranks that follow each other, such as those of a replica, fill a node before the next. Slurm "
            "keeps them on the processors of the job; Open MPI must not bind them once more."
        ),
        f'launch=("$mpirun" -n "$ranks"{where} --map-by slot --bind-to none)',
        *comment("Variables that Open MPI would not hand on to other nodes by itself:"),
        f"launch+=({' '.join(f'-x {name}' for name in names)})",
    ]


def _srun(job: Job) -> list[str]:
    kind = "pmix" if job.open_mpi else "pmi2"
    missing = f"Slurm cannot start MPI here (srun --mpi={kind}): every process would train alone; write this script "
    missing += "anew without --launcher srun"
    lines = [
        # Not --mpi=list, which also names plugins whose library is missing.
        f"srun --mpi={kind} --nodes=1 --ntasks=1 true || {refuse(missing, ExitCode.MPI)}",
        f'launch=(srun --mpi={kind} --ntasks="$ranks" --cpus-per-task="$OMP_NUM_THREADS")',
        *comment("One that dies ends all. The ranks get the environment of this script, whatever the site's default."),
        "launch+=(--kill-on-bad-exit=1 --export=ALL)",
    ]
    if not job.chooses_nodes:
        return [*lines, "launch+=(--distribution=block)"]
    return [
        *lines,
        *comment("A line a rank, for srun to follow:"),
        f'SLURM_HOSTFILE="$(mktemp)" || exit {ExitCode.MPI}',
        "export SLURM_HOSTFILE",
        "trap 'rm -f -- \"$SLURM_HOSTFILE\"' EXIT",
        'for i in "${!slots[@]}"; do',
        '    for ((rank = 0; rank < slots[i]; rank++)); do echo "${nodes[i]}"; done',
        'done >"$SLURM_HOSTFILE"',
        "unset SLURM_NTASKS_PER_NODE # which would contradict them",
        "launch+=(--distribution=arbitrary)",
    ]


def _requeue() -> list[str]:
    lost = "warning: this job could not be put back into the queue; submit it again, it goes on from its checkpoint"
    return [
        *comment(f"Code {ExitCode.STOPPED}: stopped with a checkpoint, start me again. Others are the job's own."),
        f'[ -n "$asked" ] && [ "$code" -eq {SIGNALLED} ] && code={ExitCode.STOPPED} # it was not yet listening',
        f'if [ "$code" -eq {ExitCode.STOPPED} ]; then',
        '    command -v scontrol >/dev/null && scontrol requeue "${SLURM_JOB_ID:-none}" && exit 0',
        f'    echo "{lost}" >&2',
        "fi",
        'exit "$code"',
    ]

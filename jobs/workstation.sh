#!/usr/bin/env bash
# Trains jobs/configs/quickstart.toml on 4 ranks of this machine: dp=4 pp=1 tp=1.
#
#     bash jobs/workstation.sh [options of mpitrain launch, such as --set train.steps=50]
#
# Code 75, after Ctrl-C or a time limit: stopped with a checkpoint. The same command goes on with the run. Lines that
# you may have to change have a comment. Written by:
#
#     mpitrain job jobs/configs/quickstart.toml --scheduler mpirun -n 4 --set run.folder=runs/workstation --out jobs/workstation.sh
#
set -euo pipefail
refuse() { echo "$2" >&2; exit "$1"; }

# Paths are relative to this folder:
cd -- "$(dirname -- "$0")/.." || exit 2
config=jobs/configs/quickstart.toml
python=.venv/bin/python
for file in "$config" "$python"; do
    [ -e "$file" ] || refuse 2 "there is no $file; correct the path"
done

# Threads of a rank's linear algebra: ranks times threads should not be more than the cores.
export OMP_NUM_THREADS=1

launch=(launch "$config" -n 4 --resume auto --set run.folder=runs/workstation)
# More ranks than cores may share this machine:
launch+=(--oversubscribe)
# Open MPI refuses root unless it is told; in containers that is who runs this.
if [ "$(id -u)" = 0 ]; then launch+=(--allow-root); fi

exec "$python" -m mpitrain "${launch[@]}" "$@"

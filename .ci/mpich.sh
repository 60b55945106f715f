#!/usr/bin/env bash
# The other MPI: the same training on MPICH must end with the same bits as on Open MPI.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable ".[mpich]"

flags=(jobs/configs/quickstart.toml --ranks 3 --oversubscribe --set train.steps=20 --set train.eval_every=0)
if [ "$(id -u)" = 0 ]; then flags+=(--allow-root); fi
"$folder/venv/bin/mpitrain" launch "${flags[@]}" --set "run.folder=$folder/mpich"
.venv/bin/mpitrain launch "${flags[@]}" --set "run.folder=$folder/openmpi"
hashes=$(grep -h param_sha256 "$folder"/*/summary.json | sort -u)
if [ "$(wc -l <<<"$hashes")" != 1 ]; then
    echo "MPICH and Open MPI trained different weights:"$'\n'"$hashes" >&2
    exit 1
fi
echo "MPICH and Open MPI trained the same weights"

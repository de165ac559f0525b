#!/bin/sh
# Every check, from nothing: ruff, mypy and pytest. Arguments go to pytest.
set -eu
cd "$(dirname "$0")"
EXTRAS="[test]"
. ./setup.sh
status=0
"$VENV_BIN/python" -m ruff check . || status=1
"$VENV_BIN/python" -m mypy || status=1
"$VENV_BIN/python" -m pytest "$@" || status=1
exit $status

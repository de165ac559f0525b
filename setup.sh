# Sourced by run.sh and test.sh: makes .venv with Dustin in it (and the extras in $EXTRAS), once for each state of the
# requirements. Afterwards $VENV_BIN holds python and dustin.
VENV_BIN=.venv/bin
EXTRAS=${EXTRAS:-}

python_at_least_3_11() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

if [ ! -x "$VENV_BIN/python" ]; then
    found=
    for candidate in "${PYTHON:-python3}" python3.14 python3.13 python3.12 python3.11 python; do
        if python_at_least_3_11 "$candidate"; then found=$candidate; break; fi
    done
    if [ -z "$found" ]; then
        echo "error: Python 3.11 or newer is needed; set PYTHON=/path/to/python" >&2
        exit 1
    fi
    if ! "$found" -m venv .venv; then
        rm -rf .venv
        echo "error: $found cannot make a virtual environment (on Debian: install python3-venv)" >&2
        exit 1
    fi
fi

# The mark holds what was installed: new requirements, or tests after a plain run, install again.
wanted="extras:$EXTRAS $(cat pyproject.toml constraints.txt setup.sh | cksum)"
if [ "$(cat ".venv/installed$EXTRAS" 2>/dev/null)" != "$wanted" ]; then
    echo "installing Dustin into .venv ..." >&2
    "$VENV_BIN/python" -m pip install -qq --disable-pip-version-check -c constraints.txt -e ".$EXTRAS" >&2
    echo "$wanted" >".venv/installed$EXTRAS"
fi

#!/bin/sh
# Sets up the virtual environment of `make`, or prints the Python it would take.
#
#     scripts/set_up.sh FOLDER WORDS...     # make FOLDER, install the pinned torch, then WORDS with constraints.txt
#     scripts/set_up.sh --python            # the Python that FOLDER would be made with
#     CONSTRAINTS=FILE scripts/set_up.sh ...    # with FILE instead of constraints.txt; without a torch in it: the newest
#
# Python: $PYTHON, or the first from 3.11 on that can make environments, those that the tests run on first.
# Installs with uv where it is there, else with pip.
set -eu
cd "$(dirname "$0")/.."
ABLE='import sys; sys.version_info >= (3, 11) or sys.exit(1); import ensurepip, venv'

find_python() {
    for name in ${PYTHON:-python3.11 python3.12 python3.13 python3.14 python3 python}; do
        if "$name" -c "$ABLE" > /dev/null 2>&1; then
            echo "$name"
            return
        fi
    done
    name=${PYTHON:-python3}
    found=$("$name" -c 'import sys; print("is Python", sys.version.split()[0])' 2> /dev/null) || found="does not run"
    echo "error: $name $found: meshlora needs Python 3.11 or later with venv and ensurepip;" \
        "install one (apt-get install python3 python3-venv) or name it: make PYTHON=/path/to/python" >&2
    exit 2
}

python=$(find_python)
if [ "$1" = --python ]; then
    echo "$python"
    exit
fi
folder=$1
shift
if command -v uv > /dev/null 2>&1; then
    uv venv --quiet --allow-existing --seed --python "$(command -v "$python")" "$folder"
    install="uv pip install --quiet --python $folder/bin/python"
else
    "$python" -m venv "$folder"
    install="$folder/bin/python -m pip install --quiet --disable-pip-version-check"
fi
# torch first and alone: with the pinned one in place nothing else asks for another build of it.
constraints=${CONSTRAINTS:-constraints.txt}
$install "$(grep '^torch==' "$constraints" || echo torch)"
[ $# = 0 ] || $install -c "$constraints" "$@"

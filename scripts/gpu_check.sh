#!/bin/sh
# Check what only a machine with an NVIDIA GPU can show, in under 8 minutes: see gpu_check.py.
#
#   sh scripts/gpu_check.sh OUT
#
# Without a GPU, or with --smoke, the same steps run in miniature on the CPU. PYTHON overrides the
# interpreter.
set -u
root=$(dirname "$0")/..

if [ -z "${PYTHON:-}" ]; then
    PYTHON=python
    [ -x "$root/.venv/bin/python" ] && PYTHON=$root/.venv/bin/python
fi
exec "$PYTHON" "$root/scripts/gpu_check.py" "$@"

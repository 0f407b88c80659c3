#!/bin/sh
# Measure the cases behind the rows of benchmark_results.txt, section by section.
#
#   sh benchmarks.sh [SECTION ...] [FLAGS] [-- FLAGS OF EVERY CASE]
#
# Without a section: kv. --help lists sections and flags. PYTHON, CHECKPOINT_PATH, DEVICE and RESULTS
# override the interpreter, the checkpoint, the device and the file of results.
set -eu
cd "$(dirname "$0")"

if [ -z "${PYTHON:-}" ]; then
    PYTHON=python
    if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; fi
fi
exec "$PYTHON" scripts/sweep.py run "$@"

#!/bin/sh
# The commands behind the rows of benchmark_results.txt: weights of 16, 8 and 4 bits, two cache
# formats, two depths; a row with weights as they compute stands beside every quantised one.
#
#   sh benchmarks.sh
#
# PYTHON, CHECKPOINT_PATH and RESULTS override the interpreter, the default checkpoint and the file.
# A failing case is reported and the rest still run; the exit code is then 1.
set -u
cd "$(dirname "$0")" || exit 2

if [ -z "${PYTHON:-}" ]; then
    PYTHON=python
    [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
fi
RESULTS=${RESULTS:-benchmark_results.txt}

# One measured shape: 512 prompt tokens, 128 new ones, greedy, five samples.
FLAGS="--prompt_tokens 512 --max_new_tokens 128 --temperature 0 --ignore_eos --num_samples 5"
failed=0

run() {  # weights, cache format, depth
    case="$1 weights, $2 cache, depth $3"
    set -- --quantization "$1" --kv_cache_quantization "$2" --depth "$3"
    [ -n "${CHECKPOINT_PATH:-}" ] && set -- --checkpoint_path "$CHECKPOINT_PATH" "$@"
    echo "== $case" >&2
    # shellcheck disable=SC2086  # FLAGS is a list of words
    "$PYTHON" generate.py "$@" $FLAGS --write_result "$RESULTS" || {
        echo "failed: $case" >&2
        failed=1
    }
}

for depth in 0 4096; do
    for weights in none int8 int4; do
        for kv_format in bf16 int8; do
            run "$weights" "$kv_format" "$depth"
        done
    done
done
exit $failed

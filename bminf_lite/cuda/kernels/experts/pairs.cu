// The pairs of a step, sorted by expert, and the sum of their results. Pair t * top_k + j is token t with its expert of
// rank j.
#include "common/common.cuh"
#include "constants/experts.cuh"

using namespace bminf;

constexpr int WARPS = SORT_THREADS / WARP;
constexpr int EACH = SORT_THREADS * 4;  // pairs that a block looks at together, four by each thread

// The number of this thread's pairs that belong to `expert`, as a mask, and how many belong to experts before it.
struct Found {
    unsigned mask = 0;
    int before = 0;

    __device__ __forceinline__ Found(const int* topk_ids, int pairs, int first, int expert) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int id = first + i < pairs ? topk_ids[first + i] : expert + 1;
            mask |= static_cast<unsigned>(id == expert) << i, before += id < expert;
        }
    }
};

// The sum over the threads before this one, and over all.
__device__ __forceinline__ int2 block_prefix(int x, int (&warps)[WARPS]) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int sum = x;
#pragma unroll
    for (int d = 1; d < WARP; d *= 2) {
        const int other = __shfl_up_sync(FULL, sum, d);
        if (lane >= d) sum += other;
    }
    __syncthreads();  // the sums of a call before have been read
    if (lane == WARP - 1) warps[warp] = sum;
    __syncthreads();
    int before = 0, total = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        if (w < warp) before += warps[w];
        total += warps[w];
    }
    return make_int2(before + sum - x, total);
}

// Copies rows of x to the places of their pairs: `count` of them, listed in shared memory as (pair, place).
__device__ __forceinline__ void copy_rows(
    const int2* list, int count, const uint4* x, const float* scales, const float* factors, int top_k, int words,
    uint4* sorted, float* sorted_scales) {
    const int lane = threadIdx.x % WARP;
    for (int i = threadIdx.x / WARP; i < count; i += WARPS) {
        const int2 entry = list[i];
        const int token = entry.x / top_k;
        if (lane == 0 && scales)
            sorted_scales[entry.y] = factors ? __fmul_rn(scales[token], factors[entry.x]) : scales[token];
        const uint4* from = x + static_cast<size_t>(token) * words;
        uint4* to = sorted + static_cast<size_t>(entry.y) * words;
#pragma unroll 4
        for (int word = lane; word < words; word += WARP) to[word] = from[word];
    }
}

// topk_ids: [pairs]. offsets: [experts + 1], sorted_pairs: [pairs], as in backend/experts.py; places: [pairs], the
// place of each pair among the sorted ones. The rows of x [tokens, words of 16 bytes], unless it is null, are copied to
// the places of their pairs, and so are `scales` [tokens], unless null, times `factors` [pairs], unless null.
//
// Grid: (experts, parts). The blocks of an expert all find its pairs; the first one writes them, and each copies its
// share of their rows. Every block counts the pairs before its expert's itself, so none waits for another.
__global__ void __launch_bounds__(SORT_THREADS) sort_by_expert(
    const int* topk_ids, int pairs, int top_k, int* offsets, int* sorted_pairs, int* places, const void* x,
    const float* scales, const float* factors, int words, void* sorted, float* sorted_scales) {
    __shared__ int warps[WARPS];
    __shared__ int2 list[SORT_LIST];
    launch_dependent_grids();
    wait_on_dependent_grids();
    const int expert = blockIdx.x, part = blockIdx.y, parts = gridDim.y;
    int before = 0, own = 0;
    for (int first = threadIdx.x * 4; first < pairs; first += EACH) {
        const Found found(topk_ids, pairs, first, expert);
        before += found.before, own += __popc(found.mask);
    }
    before = block_prefix(before, warps).y, own = block_prefix(own, warps).y;
    if (part == 0 && threadIdx.x == 0) {
        offsets[expert] = before;
        if (expert == gridDim.x - 1) offsets[expert + 1] = pairs;
    }
    // The list holds a part of an expert's pairs; another pass over the ids finds the next part.
    for (int done = 0; done < own; done += SORT_LIST * parts) {
        int count = 0;  // of the expert's pairs before `base`
        for (int base = 0; base < pairs; base += EACH) {
            const int first = base + threadIdx.x * 4;
            const Found found(topk_ids, pairs, first, expert);
            const int2 prefix = block_prefix(__popc(found.mask), warps);
            int index = count + prefix.x;
            count += prefix.y;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (!(found.mask >> i & 1)) continue;
                const int pair = first + i, place = before + index, listed = index - done;
                if (part == 0 && done == 0) sorted_pairs[place] = pair, places[pair] = place;
                if (listed >= 0 && listed < SORT_LIST * parts && index % parts == part)
                    list[listed / parts] = make_int2(pair, place);
                ++index;
            }
        }
        __syncthreads();
        const int listed = min(own - done, SORT_LIST * parts);
        if (x)
            copy_rows(
                list, listed / parts + (listed % parts > part), static_cast<const uint4*>(x), scales, factors, top_k,
                words, static_cast<uint4*>(sorted), sorted_scales);
        __syncthreads();
    }
}

// out = sum over j of weights[t, j] * results[places[t, j]], from rank 0 on, and then gate[t] * addend[t], each product
// and each sum rounded, and with ADD added to fp32 values in memory. results: fp16 [pairs, pitch]; weights: [rows,
// top_k], or null for ones; addend: fp32 [rows, addend_pitch] or null; gate: [rows], or null for ones; out: fp32 [rows,
// out_pitch]. Grid: (columns, rows); a thread has eight columns.
template <bool ADD>
__global__ void __launch_bounds__(SUM_THREADS) weighted_sum(
    const __half* results, long long pitch, const int* places, const float* weights, int top_k, const float* addend,
    long long addend_pitch, const float* gate, float* out, long long out_pitch, int columns) {
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
    if (addend) {
        float x[8];
        load8(addend + row * addend_pitch + column, x);
        const float factor = gate ? gate[row] : 1.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] = __fadd_rn(sum[i], __fmul_rn(factor, x[i]));
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

// Copies the experts that a layer's tokens chose from host memory, which the GPU reads, into the slots of a cache. The
// policy is that of memory/expert_cache.py. The host does nothing in a step.
#include "common/async.cuh"
#include "common/common.cuh"
#include "constants/experts.cuh"

using namespace bminf;

constexpr int WARPS = FETCH_THREADS / WARP;
static_assert(MAX_EXPERTS <= FETCH_THREADS && WARPS <= WARP);
using Key = unsigned long long;
constexpr Key NO_KEY = ~0ull;

__device__ __forceinline__ Key warp_min(Key x) {
#pragma unroll
    for (int d = WARP / 2; d; d /= 2) {
        const Key other = __shfl_xor_sync(FULL, x, d);
        x = other < x ? other : x;
    }
    return x;
}

// The slots of a pool. first: the number of the layer's first expert among those of all layers; chosen: how many tokens
// chose each of the layer's experts, in shared memory; counts: what the experts of all layers are worth.
struct Slots {
    const int *owners, *counts, *chosen;
    int num_slots, first, experts;

    // The slot with the smallest key is emptied first. A key is the worth of the slot's expert, then the slot's number;
    // a slot that the layer needs has NO_KEY.
    __device__ __forceinline__ Key key(int slot) const {
        const int owner = __ldcg(owners + slot), own = owner - first;
        if (own >= 0 && own < experts && chosen[own]) return NO_KEY;
        const unsigned worth = owner < 0 ? 0 : __ldcg(counts + owner) + 1;
        return static_cast<Key>(worth) << 32 | static_cast<unsigned>(slot);
    }
    // The smallest key of this thread's slots.
    __device__ __forceinline__ Key smallest() const {
        Key found = NO_KEY;
#pragma unroll 4
        for (int slot = threadIdx.x; slot < num_slots; slot += FETCH_THREADS) {
            const Key other = key(slot);
            found = other < found ? other : found;
        }
        return found;
    }
};

// Finds the missing experts of a layer, gives slots to them, and lists both. topk_ids: [tokens, top_k]; slots, counts:
// of the experts of all layers, of which the layer has `experts` from `first` on; owners: [num_slots], the experts in
// the slots; slots and owners are -1 for none; clock: tokens that the layer has seen since its counts were halved;
// found: hits and misses so far; copies: their number, and then an expert of the layer and a slot for each. num_slots
// is at least `experts`, so a slot is always found. One block.
__global__ void __launch_bounds__(FETCH_THREADS) find_missing(
    const int* topk_ids, int tokens, int top_k, int first, int experts, int* slots, int* owners, int* counts,
    int* clock, unsigned long long* found, int* copies, int num_slots) {
    __shared__ int chosen[MAX_EXPERTS], missing[MAX_EXPERTS];
    __shared__ unsigned needed_masks[WARPS], missing_masks[WARPS];
    __shared__ Key smallest[2][WARPS];
    launch_dependent_grids();
    const int expert = threadIdx.x, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (expert < MAX_EXPERTS) chosen[expert] = 0;
    __syncthreads();
    wait_on_dependent_grids();
    for (int i = threadIdx.x; i < tokens * top_k; i += FETCH_THREADS)
        asm volatile("red.shared.add.s32 [%0], 1;" ::"r"(cast_smem_ptr_to_uint(chosen + __ldcg(topk_ids + i)))
                     : "memory");
    const int seen = __ldcg(clock) + tokens;
    __syncthreads();
    const bool exists = expert < experts, is_needed = exists && chosen[exists ? expert : 0];
    if (exists) {
        const int halvings = min(seen / EXPERT_HALF_LIFE, 31);
        const int worth = __ldcg(counts + first + expert) >> halvings;
        counts[first + expert] = worth + chosen[expert] * EXPERT_CHOICE;
    }
    const bool is_missing = is_needed && __ldcg(slots + first + expert) < 0;
    const unsigned own = __ballot_sync(FULL, is_missing), own_needed = __ballot_sync(FULL, is_needed);
    if (lane == 0) missing_masks[warp] = own, needed_masks[warp] = own_needed;
    __syncthreads();
    int rank = __popc(own & ((1u << lane) - 1)), total = 0, needed = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        const int count = __popc(missing_masks[w]);
        if (w < warp) rank += count;
        total += count, needed += __popc(needed_masks[w]);
    }
    if (is_missing) missing[rank] = expert;
    if (threadIdx.x == 0) {
        *clock = seen % EXPERT_HALF_LIFE, copies[0] = total;
        found[0] += needed - total, found[1] += total;
    }
    if (total == 0) return;
    const Slots pool = {owners, counts, chosen, num_slots, first, experts};
    Key best = pool.smallest();
#pragma unroll 1
    for (int i = 0; i < total; ++i) {
        const Key of_warp = warp_min(best);
        if (lane == 0) smallest[i % 2][warp] = of_warp;
        __syncthreads();  // and `missing`
        const Key victim = warp_min(lane < WARPS ? smallest[i % 2][lane] : NO_KEY);
        if (victim != best) continue;
        const int slot = static_cast<int>(victim & 0xffffffffu), old = __ldcg(owners + slot);
        if (old >= 0) slots[old] = -1;
        owners[slot] = first + missing[i], slots[first + missing[i]] = slot;
        copies[1 + 2 * i] = missing[i], copies[2 + 2 * i] = slot;
        best = pool.smallest();
    }
}

// The first or the second matrix of each expert of a layer, in host memory, and of each slot, in words of 16 bytes.
struct Matrices {
    const uint4* from;
    uint4* to;
    int words;

    static constexpr int EACH = 4, CHUNK = EACH * COPY_THREADS;  // words of a thread, and of a block
    __device__ __forceinline__ int chunks() const { return (words + CHUNK - 1) / CHUNK; }
    __device__ __forceinline__ void copy(int expert, int slot, int chunk) const {
        const uint4* source = from + static_cast<size_t>(expert) * words;
        uint4* target = to + static_cast<size_t>(slot) * words;
        const int first = chunk * CHUNK + threadIdx.x;
        uint4 x[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) x[i] = ld_global_v4(source + min(first + i * COPY_THREADS, words - 1));
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (first + i * COPY_THREADS < words) target[first + i * COPY_THREADS] = x[i];
    }
};

// Copies the experts that find_missing listed. hidden, down: the matrices of all experts of the layer, in host memory;
// hidden_slots, down_slots: those of all slots; hidden_words, down_words: words of 16 bytes of a matrix. Many blocks
// keep the link to the host busy.
__global__ void __launch_bounds__(COPY_THREADS) copy_experts(
    const int* copies, const void* hidden, const void* down, void* hidden_slots, void* down_slots, int hidden_words,
    int down_words) {
    launch_dependent_grids();
    wait_on_dependent_grids();
    const Matrices first = {static_cast<const uint4*>(hidden), static_cast<uint4*>(hidden_slots), hidden_words};
    const Matrices second = {static_cast<const uint4*>(down), static_cast<uint4*>(down_slots), down_words};
    const int of_first = first.chunks(), each = of_first + second.chunks(), total = __ldcg(copies) * each;
#pragma unroll 1
    for (int i = blockIdx.x; i < total; i += gridDim.x) {
        const int expert = __ldcg(copies + 1 + i / each * 2), slot = __ldcg(copies + 2 + i / each * 2),
                  chunk = i % each;
        if (chunk < of_first)
            first.copy(expert, slot, chunk);
        else
            second.copy(expert, slot, chunk - of_first);
    }
}

// Which token of which sequence a block has.
#pragma once
#include "common/common.cuh"

namespace bminf {

// The token of a block: its row, its sequence, and its position there.
struct Place {
    int token, sequence, position;
};

// The token number `index` of the step. Each lane looks at one of the sequences, or at one in `step` of those that are
// left. Called by all lanes of a warp.
__device__ __forceinline__ Place find_place(const int* cu_seqlens, const int* context_lens, int sequences, int index) {
    const int lane = threadIdx.x % WARP, token = cu_seqlens[0] + index;
    for (int first = 0, left = sequences;;) {
        const int step = (left + WARP - 1) / WARP, own = min(lane * step, left - 1);
        const int start = cu_seqlens[first + own], context = context_lens[first + own];
        const unsigned starts_before = __ballot_sync(FULL, lane * step < left && start <= token);
        const int last = __popc(starts_before) - 1;
        if (step == 1) return {token, first + last, token + __shfl_sync(FULL, context - start, last)};
        first += last * step, left = min(step, left - last * step);
    }
}

// That of the block.
__device__ __forceinline__ Place find_place(const int* cu_seqlens, const int* context_lens, int sequences) {
    return find_place(cu_seqlens, context_lens, sequences, blockIdx.x);
}

}  // namespace bminf

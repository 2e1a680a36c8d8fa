// Which sequence of a batch a token belongs to.
#pragma once

namespace bminf {

// The sequence b with cu_seqlens[b] <= token < cu_seqlens[b + 1], by bisection. cu_seqlens: int32 [sequences + 1].
__device__ __forceinline__ int find_sequence(const int* cu_seqlens, int sequences, int token) {
    int first = 0, last = sequences;
    while (last - first > 1) {
        const int middle = (first + last) / 2;
        if (cu_seqlens[middle] <= token)
            first = middle;
        else
            last = middle;
    }
    return first;
}

}  // namespace bminf

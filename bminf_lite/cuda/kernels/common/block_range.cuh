// How the blocks of a grid divide the channels of a weight among themselves.
#pragma once
#include "constants/epilogue.cuh"

namespace bminf {

// The outputs of one block, in groups of GROUP channels: `count` of `outputs` groups, from `first` on. All blocks have
// the same number, give or take one. With GATED each group of outputs has two groups of the weight, gate and up: a
// block numbers its groups locally from 0 to groups() - 1, those of the gate first.
template <int EPILOGUE, int GROUP>
struct BlockRange {
    static constexpr int MATRICES = EPILOGUE == GATED ? 2 : 1;
    int outputs, first, count;

    __device__ __forceinline__ explicit BlockRange(int n) {
        outputs = (n / MATRICES + GROUP - 1) / GROUP;
        const unsigned all = outputs;  // times the number of blocks below 2^32
        first = all * blockIdx.x / gridDim.x;
        count = all * (blockIdx.x + 1) / gridDim.x - first;
    }
    __device__ __forceinline__ int groups() const { return count * MATRICES; }
    __device__ __forceinline__ int group(int local) const {  // of the weight
        return MATRICES == 2 && local >= count ? outputs + first + local - count : first + local;
    }
};

}  // namespace bminf

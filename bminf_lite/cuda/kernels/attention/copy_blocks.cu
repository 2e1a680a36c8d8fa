// Copies blocks of key-value caches, those of all layers in one launch.
#include "common/common.cuh"

using namespace bminf;

// nbytes bytes, a multiple of 16, from one address to another; both are multiples of 16.
struct BlockCopy {
    uint4* target;
    const uint4* source;
    long long nbytes;
};

// Makes copies[blockIdx.x]; gridDim.y blocks share each.
__global__ void __launch_bounds__(256) copy_blocks(const BlockCopy* copies) {
    wait_on_dependent_grids();
    const BlockCopy copy = copies[blockIdx.x];
    const long long first = static_cast<long long>(blockIdx.y) * blockDim.x + threadIdx.x;
    for (long long i = first; i < copy.nbytes / 16; i += static_cast<long long>(gridDim.y) * blockDim.x)
        copy.target[i] = copy.source[i];
}

// Adapters that the rows of a step choose, and what they add to a product: see rowwise/adapters.cu.
//
// A slot of a weight is one block of memory: a header, whose first int is the adapter's rank, a multiple of RANKS, or 0
// in an empty slot; scales fp32 [sections, rank]; down fp16 [sections, rank, down_pitch] with zeros behind column k; up
// fp16 [outputs, rank]. Ranks that a section does not have are zeros.
//
// Tensor cores multiply the inputs of 8 or 16 rows by `up`, RANKS at a time. Of these a lane reads four neighbouring
// ones, ranks 4 q to 4 q + 3 with q = lane % 4: the first two are columns 2 q of the fragment, the others 2 q + 8. All
// kernels take the ranks in this order, whichever operand is the left one.
#pragma once
#include "common/common.cuh"
#include "common/counters.cuh"
#include "common/tensor_cores.cuh"

namespace bminf {

constexpr int RANKS = 16, ADAPTER_HEADER = 128;

__device__ __forceinline__ uint2 ld_global_cg_v2(const void* p) {
    uint2 x;
    asm volatile("ld.global.cg.v2.b32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(p) : "memory");
    return x;
}

// A load that the compiler leaves where it is.
__device__ __forceinline__ uint2 ld_global_nc_v2(const void* p) {
    uint2 x;
    asm volatile("ld.global.nc.v2.b32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(p) : "memory");
    return x;
}

// The side product of a weight [outputs, k]. slots: of the rows, from 1 on, or 0; adapters: all slots of the weight, of
// `adapter_stride` bytes each; inputs: fp16 [rows, input_columns], of which a section has `rank_pitch` columns. The
// first three sections end at the outputs `end0`, `end1` and `end2`.
//
// ready: null, or a counter, 0 before and after, by which a product starts beside the kernel of its side inputs, see
// wait_for_operands.
struct SideProduct {
    const int* slots;
    const char* adapters;
    long long adapter_stride;
    const __half* inputs;
    int* ready;
    int input_columns, rank_pitch, down_pitch, sections, end0, end1, end2, outputs;

    __device__ __forceinline__ int section(int output) const {
        return (output >= end0) + (output >= end1) + (output >= end2);
    }
    // The output behind the last one of a section.
    __device__ __forceinline__ int end(int section) const {
        return section == 0 ? end0 : section == 1 ? end1 : section == 2 ? end2 : outputs;
    }
    __device__ __forceinline__ const char* adapter(int slot) const { return adapters + (slot - 1) * adapter_stride; }
    __device__ __forceinline__ int rank(int slot) const {
        return slot > 0 ? *reinterpret_cast<const int*>(adapter(slot)) : 0;
    }
    // Where `up` begins in a slot whose rank is `rank`.
    __device__ __forceinline__ const __half* up(int slot, int rank) const {
        return reinterpret_cast<const __half*>(
            adapter(slot) + ADAPTER_HEADER + static_cast<size_t>(sections) * rank * (4 + 2 * down_pitch));
    }
    // This lane's ranks of RANKS from `first` on, of an output or of a row's inputs for a section.
    __device__ __forceinline__ uint2 up_ranks(const __half* up, int rank, int output, int first) const {
        const __half* from = up + static_cast<size_t>(min(output, outputs - 1)) * rank + first + threadIdx.x % 4 * 4;
        return *reinterpret_cast<const uint2*>(from);
    }
    __device__ __forceinline__ uint2 input_ranks(int row, int section, int first) const {
        const int column = section * rank_pitch + first + threadIdx.x % 4 * 4;
        return ld_global_cg_v2(inputs + static_cast<size_t>(row) * input_columns + column);
    }
    // Waits for what the product multiplies, `rows` rows, if there is a counter: a thread of each block calls it. The
    // kernel that writes the rows' codes adds 1 to the counter for each row (release): that of the side inputs, or that
    // of a norm before it. If it does not, the kernel of the side inputs adds `rows` behind its own wait, when all
    // kernels before it are complete and what they wrote is visible. Who acquires all of them sees the codes. The
    // inputs of the side product are complete only behind wait_on_dependent_grids, and so are the last reads of what
    // the product may overwrite.
    __device__ __forceinline__ void wait_for_operands(int rows) const {
        while (ld_acquire(ready) < rows) {
        }
        red_increment(ready, rows + gridDim.x - 1);  // the last block makes it 0 again
    }
    static constexpr bool EXISTS = true;
};

// No side product.
struct NoSide {
    static constexpr bool EXISTS = false;
};

// d += the left rows (r and r + 8 of them, in `low` and `high`) times the right ones, over RANKS ranks.
__device__ __forceinline__ void mma_ranks(float (&d)[4], uint2 low, uint2 high, uint2 right) {
    const unsigned left[4] = {low.x, high.x, low.y, high.y};
    mma_m16n8k16(d, left, right.x, right.y);
}

// y + side; where that is zero, y, so that it keeps the sign of a zero.
__device__ __forceinline__ float add_side(float y, float side) { return side != 0 ? __fadd_rn(y, side) : y; }

}  // namespace bminf

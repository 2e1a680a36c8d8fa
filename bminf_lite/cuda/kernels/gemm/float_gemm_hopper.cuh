// Copies of the operands of products with float activations on compute capability 9.0.
#pragma once
#include "common/async.cuh"

namespace bminf {

#if __CUDA_ARCH__ >= 900
// Loads a box of a gated layer's weight. The map's dimensions are column, channel in a group of eight, gate or up, and
// group, so 16 rows of the box are eight channels of the gate and the same eight of up.
__device__ __forceinline__ void tma_load_4d(
    unsigned target, const TensorMap& map, int column, int group, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %3, %4}], [%5];" ::"r"(target),
        "l"(&map), "r"(column), "r"(0), "r"(group), "r"(barrier)
        : "memory");
}

// The same of a weight that is read once: its lines are the first that the L2 cache evicts.
__device__ __forceinline__ void tma_load_4d_evict_first(
    unsigned target, const TensorMap& map, int column, int group, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3, %3, %4}], [%5], %6;" ::"r"(target),
        "l"(&map), "r"(column), "r"(0), "r"(group), "r"(barrier), "l"(EVICT_FIRST)
        : "memory");
}

// Loads blocks of 64 columns of all rows of the activations.
__device__ __forceinline__ void tma_load_3d(
    unsigned target, const TensorMap& map, int column, int block, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::
            "r"(target),
        "l"(&map), "r"(column), "r"(0), "r"(block), "r"(barrier)
        : "memory");
}
#endif

}  // namespace bminf

// Where the weights of experts lie: those of all experts in order, or in the slots of a cache.
#pragma once
#include "common/common.cuh"

namespace bminf {

// The place of an expert's weights, counted in experts. slots: [experts], or null if the weights lie in order.
__device__ __forceinline__ int slot_of(const int* slots, int expert) { return slots ? __ldcg(slots + expert) : expert; }

}  // namespace bminf

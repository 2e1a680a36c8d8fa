// Adapters of experts that the tokens of a step choose, and what they add to the products of sorted pairs.
//
// A slot is one block of memory: a header, whose first int is the rank of all adapters in it, a multiple of RANKS, or 0
// in an empty slot; and for each expert scales fp32 [sections, rank], down fp16 [sections, rank, down_pitch] with zeros
// behind column k, and up fp16 [sections, width, rank]. Sections are gate and up, or one matrix. Ranks that a matrix
// does not have are zeros.
//
// Of codes, tensor cores multiply as common/adapters.cuh says: the left operand are 16 channels of an expert, in the
// order in which its weight has them, the right one eight sorted rows. Of floats, a sum begins with the first rank and
// goes on by fma.
#pragma once
#include "common/adapters.cuh"
#include "common/common.cuh"

namespace bminf {

// Of one weight of all experts, for sorted pairs, or for pairs in their own order. pair_slots: theirs; inputs: fp16
// [pairs, sections * rank_pitch].
struct PairSide {
    int* pair_slots;
    const char* adapters;
    long long adapter_stride;
    __half* inputs;
    int sections, rank_pitch, down_pitch, width;

    __device__ __forceinline__ int slot(int row) const { return __ldcg(pair_slots + row); }
    __device__ __forceinline__ const char* adapter(int slot) const { return adapters + (slot - 1) * adapter_stride; }
    __device__ __forceinline__ int rank(int slot) const {
        return slot > 0 ? *reinterpret_cast<const int*>(adapter(slot)) : 0;
    }
    __device__ __forceinline__ const float* scales(int slot, int rank, int expert) const {
        const size_t each = static_cast<size_t>(sections) * rank * (4 + 2 * (down_pitch + width));
        return reinterpret_cast<const float*>(adapter(slot) + ADAPTER_HEADER + each * expert);
    }
    __device__ __forceinline__ const __half* down(int slot, int rank, int expert) const {
        return reinterpret_cast<const __half*>(scales(slot, rank, expert) + sections * rank);
    }
    __device__ __forceinline__ const __half* up(int slot, int rank, int expert) const {
        return down(slot, rank, expert) + static_cast<size_t>(sections) * rank * down_pitch;
    }
    __device__ __forceinline__ __half* inputs_of(int row, int section) const {
        return inputs + (static_cast<size_t>(row) * sections + section) * rank_pitch;
    }
    // y plus the side product of a row with an output of a section, by fma.
    __device__ __forceinline__ float added(
        float y, int row, int slot, int rank, int expert, int section, int output) const {
        if (!rank || output >= width) return y;
        const __half* values = up(slot, rank, expert) + (static_cast<size_t>(section) * width + output) * rank;
        const __half* own = inputs_of(row, section);
        float sum = 0;
#pragma unroll 1
        for (int at = 0; at < rank; at += 8) {
            const uint4 a = ld_global_cg_v4(own + at), b = ld_global_v4(values + at);
            float x[8], w[8];
            load8(reinterpret_cast<const __half*>(&a), x);
            load8(reinterpret_cast<const __half*>(&b), w);
#pragma unroll
            for (int i = 0; i < 8; ++i) sum = fmaf(x[i], w[i], sum);
        }
        return add_side(y, sum);
    }
    static constexpr bool EXISTS = true;
};

// What a lane reads of eight sorted rows for a side product: of row lane / 4 its slot, and four of the first RANKS
// inputs of each section.
template <bool IS_GATED>
struct PairInputs {
    int slot;
    uint2 ranks[IS_GATED ? 2 : 1];
};

// The side products of BLOCKS blocks of 16 channels, which lie STRIDE channels apart, of a warp with eight sorted rows
// at a time. They come in registers as mma has them: of channels lane / 4 and 8 behind, rows lane % 4 * 2 and the next.
template <int BLOCKS, int STRIDE, bool IS_GATED>
struct PairSums {
    static constexpr int SECTIONS = IS_GATED ? 2 : 1;
    using Inputs = PairInputs<IS_GATED>;
    const PairSide& side;
    int expert, channel;              // of the tile: its expert, and its first channel
    int slot = 0;                     // of the ranks below
    int known = 0, rank = 0;          // the slot before, and its rank
    uint2 low[BLOCKS], high[BLOCKS];  // this lane's of the first RANKS of its channels

    __device__ __forceinline__ explicit PairSums(const PairSide& side) : side(side) {}
    // A new tile, whose first row the inputs are of.
    __device__ __forceinline__ void begin(int expert, int channel, const Inputs& first) {
        this->expert = expert, this->channel = channel, slot = 0;
        const int own = __shfl_sync(FULL, first.slot, 0);
        if (own > 0) use(own);
    }
    // Fetches the ranks of a tile's channels into the L2 cache.
    __device__ __forceinline__ void prefetch(int slot, int expert, int channel) {
        rank = side.rank(slot), known = slot;
        if (!rank) return;
        this->slot = slot, this->expert = expert, this->channel = channel;
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) {
            const __half *low, *high;
            find_up(b, 0, low, high);
            if (low) prefetch_l2(low);
            if (high) prefetch_l2(high);
        }
    }
    // Of rows first to first + 7, of which those behind `last` are that one.
    __device__ __forceinline__ Inputs load(int first, int last) const {
        const int row = min(first + static_cast<int>(threadIdx.x) % WARP / 4, last);
        Inputs inputs;
        inputs.slot = side.slot(row);
        load_inputs(row, 0, inputs.ranks);
        return inputs;
    }
    // found: the sums of block `b` with the rows that `inputs` are of, zeros where a row has no adapter.
    __device__ __forceinline__ void products(int b, const Inputs& inputs, int first, int last, float (&found)[4]) {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int i = 0; i < 4; ++i) found[i] = 0;
        unsigned left = __ballot_sync(FULL, inputs.slot > 0);
#pragma unroll 1
        while (left) {
            const int now = __shfl_sync(FULL, inputs.slot, __ffs(left) - 1);
            const unsigned own = __ballot_sync(FULL, inputs.slot == now);  // four lanes a row
            left &= ~own;
            if (now != slot) use(now);
            if (!rank) continue;
            float d[SECTIONS][4] = {};
            multiply(d, low[b], high[b], inputs.ranks);
#pragma unroll 1
            for (int at = RANKS; at < rank; at += RANKS) {
                uint2 more[SECTIONS], more_low, more_high;
                load_inputs(min(first + lane / 4, last), at, more);
                load_up(b, at, more_low, more_high);
                multiply(d, more_low, more_high, more);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (own >> ((lane % 4 * 2 + i % 2) * 4) & 1) found[i] = d[IS_GATED ? i / 2 : 0][i];
        }
    }

    // The sums of one row, in the place of each of the eight.
    __device__ __forceinline__ void products_of(int row, int expert, int channel, float (&found)[4]) {
        const Inputs inputs = load(row, row);
        begin(expert, channel, inputs);
        products(0, inputs, row, row, found);
    }

private:
    __device__ __forceinline__ void use(int slot) {
        this->slot = slot;
        if (slot != known) known = slot, rank = side.rank(slot);
        if (!rank) return;
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) load_up(b, 0, low[b], high[b]);
    }
    __device__ __forceinline__ void load_inputs(int row, int at, uint2 (&ranks)[SECTIONS]) const {
#pragma unroll
        for (int s = 0; s < SECTIONS; ++s)
            ranks[s] = ld_global_cg_v2(side.inputs_of(row, s) + at + threadIdx.x % 4 * 4);
    }
    // Where this lane's ranks of its two channels lie; null behind the last output. Of a gated weight, eight channels
    // of the gate and then eight of up have the same outputs.
    __device__ __forceinline__ void find_up(int b, int at, const __half*& low, const __half*& high) const {
        const __half* const up = side.up(slot, rank, expert) + at + threadIdx.x % 4 * 4;
        const int output = (channel + b * STRIDE) / SECTIONS + threadIdx.x % WARP / 4;
        const int other = IS_GATED ? output : output + 8, width = side.width;
        low = output < width ? up + static_cast<size_t>(output) * rank : nullptr;
        high = other < width ? up + static_cast<size_t>(other + (IS_GATED ? width : 0)) * rank : nullptr;
    }
    __device__ __forceinline__ void load_up(int b, int at, uint2& low, uint2& high) const {
        const __half *from_low, *from_high;
        find_up(b, at, from_low, from_high);
        low = high = uint2{};
        if (from_low) low = ld_global_nc_v2(from_low);
        if (from_high) high = ld_global_nc_v2(from_high);
    }
    // Gate and up have inputs of their own, so each has sums of its own, of which the other's rows are zeros.
    __device__ __forceinline__ static void multiply(
        float (&d)[SECTIONS][4], uint2 low, uint2 high, const uint2 (&right)[SECTIONS]) {
        if constexpr (IS_GATED) {
            mma_ranks(d[0], low, uint2{}, right[0]);
            mma_ranks(d[SECTIONS - 1], uint2{}, high, right[SECTIONS - 1]);
        } else {
            mma_ranks(d[0], low, high, right[0]);
        }
    }
};

// The same of no side product.
template <int BLOCKS, int STRIDE, bool IS_GATED>
struct NoPairSums {
    struct Inputs {};
    __device__ __forceinline__ explicit NoPairSums(const NoSide&) {}
};

template <class Side, int BLOCKS, int STRIDE, bool IS_GATED>
using SumsOf =
    typename Conditional<Side::EXISTS, PairSums<BLOCKS, STRIDE, IS_GATED>, NoPairSums<BLOCKS, STRIDE, IS_GATED>>::type;

}  // namespace bminf

// A few rows by mma.sync. The weight is its left operand and the rows of x are the right one. A warp has 16 rows of a
// tile and makes their whole sums. A chain of steps takes as long as the latency of its steps, so a warp loads the
// operands of the next block of columns while it multiplies those of one.
#pragma once
#include "common/tensor_cores.cuh"
#include "gemm/skinny_float_gemm_hopper.cuh"

namespace bminf {

// What a lane has of a block of 64 columns, for a warp's 16 rows of the weight and ROWS rows of x: fragments of x, and
// of the weight as fp16 or codes. A fragment of codes is loaded like one of 16-bit elements, so that a lane has four
// neighbouring columns of a step in place of two pairs. The order within a step is arbitrary as long as x has the same.
template <class W, int ROWS>
struct Operands {
    static constexpr bool FROM_CODES = sizeof(W) == 1;
    static constexpr int STEPS = BLOCK / STEP, TILES = (ROWS + 7) / 8, LOADS = BLOCK * sizeof(W) / 32;
    unsigned w[LOADS][4];
    unsigned x[TILES][STEPS][2];

    // Where a lane reads in a box of the weight, and in a block of x at `rows`.
    __device__ __forceinline__ static int own_weight() {
        const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        return (warp * STEP + lane % 16) * ROW + ((lane % 8 ^ lane / 16) << 4);
    }
    __device__ __forceinline__ static unsigned own_x(unsigned rows) {
        const int lane = threadIdx.x % WARP;
        const int row = FROM_CODES ? lane / 4 : lane % 8, piece = FROM_CODES ? lane % 4 / 2 : lane / 8;
        const int inside = FROM_CODES ? lane % 2 * 8 : 0;
        if (ROWS == 1) return rows + piece * 16 + inside;
        const unsigned address = rows + row * ROW;
        return address + ((address / ROW % 8 ^ piece) << 4) + inside;
    }
    // Of a single row the pieces of 16 bytes lie in order, else as the swizzle of 128 bytes puts them.
    __device__ __forceinline__ static unsigned moved(unsigned address, int bytes) {
        return ROWS == 1 ? address + bytes : address ^ bytes;
    }
    __device__ __forceinline__ void load(unsigned weight, unsigned rows) {
#pragma unroll
        for (int i = 0; i < LOADS; ++i) ldmatrix_x4(w[i], weight ^ i << 5);
        const unsigned own = own_x(rows);
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            if constexpr (FROM_CODES) {
#pragma unroll
                for (int i = 0; i < STEPS; ++i) ld_shared_v2(x[t][i], moved(own, i * 32) + t * 8 * ROW);
            } else {
#pragma unroll
                for (int i = 0; i < STEPS; i += 2) {
                    unsigned pair[4];
                    ldmatrix_x4(pair, moved(own, i * 32) + t * 8 * ROW);
                    x[t][i][0] = pair[0], x[t][i][1] = pair[1], x[t][i + 1][0] = pair[2], x[t][i + 1][1] = pair[3];
                }
            }
        }
    }
    // c += the products of step i.
    __device__ __forceinline__ void multiply(int i, float (&c)[TILES][4]) const {
        unsigned a[4];
        if constexpr (FROM_CODES) {
#pragma unroll
            for (int h = 0; h < 2; ++h) halves_of_codes(w[i / 2][i % 2 * 2 + h], a[h], a[2 + h]);
        } else {
#pragma unroll
            for (int j = 0; j < 4; ++j) a[j] = w[i % LOADS][j];
        }
#pragma unroll
        for (int t = 0; t < TILES; ++t) mma_m16n8k16(c[t], a, x[t][i][0], x[t][i][1]);
    }
};

// A warp that multiplies and writes.
template <class W, int ROWS, int GROUP, class S, int EPILOGUE, int F>
__device__ __forceinline__ void mma_warp(
    const SharedMemory<W, GROUP, S>& shared, const WorkTiles& work, const Outputs& outputs) {
    using Contents = Stage<W, GROUP, S>;
    using Loaded = Operands<W, ROWS>;
    constexpr bool SCALED = sizeof(W) == 1 && GROUP == 0;
    constexpr int BLOCKS = Contents::BLOCKS, STEPS = BLOCK / STEP, TILES = Loaded::TILES;
    const unsigned own_weight = Loaded::own_weight();
    PipelineState pipe(shared.stages);
    const auto wait = [&](const PipelineState& at) {
        mbarrier_wait(shared.weight_full(at.index), at.phase);
        if (!shared.resident) mbarrier_wait(shared.activations_full(at.index), at.phase);
    };
    Loaded operands[2];
    const auto load = [&](int to, int step, int stage, int block) {
        const int box = block / Contents::IN_BOX, piece = block % Contents::IN_BOX * STEPS;
        const unsigned weight = shared.weight(stage) + box * shared.box + own_weight;
        operands[to].load(weight ^ piece << 4, shared.activations(step, stage, block));
    };
    const int count = work.count();
    if (count == 0) return;
    wait(pipe);
    load(0, 0, pipe.index, 0);
    for (int t = 0; t < count; ++t) {
        const TileOutputs<EPILOGUE, F, SCALED> tile(outputs, work.tile(t) * shared.channels);
        float c[TILES][4] = {}, sum[TILES][4] = {};
#pragma unroll 1
        for (int step = 0; step < work.steps; ++step) {
            const int stage = pipe.index;
            const bool is_last = step + 1 == work.steps;
            pipe.next();
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b) {
                if (b + 1 < BLOCKS) {
                    load((b + 1) % 2, step, stage, b + 1);
                } else if (!is_last || t + 1 < count) {
                    wait(pipe);
                    load(0, is_last ? 0 : step + 1, pipe.index, 0);
                }
#pragma unroll
                for (int i = 0; i < STEPS; ++i) {
                    operands[b % 2].multiply(i, c);
                    if constexpr (GROUP > 0) {
                        const int end = b * BLOCK + (i + 1) * STEP, group = end / GROUP - 1;
                        if (end % GROUP != 0 || step * Contents::GROUPS + group >= outputs.groups) continue;
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            const float scale = group_scale<S, EPILOGUE == GATED>(shared, stage, group, h);
#pragma unroll
                            for (int n = 0; n < TILES; ++n)
#pragma unroll
                                for (int j = 2 * h; j < 2 * h + 2; ++j)
                                    sum[n][j] = add_group(sum[n][j], scale, c[n][j]), c[n][j] = 0;
                        }
                    }
                }
            }
            __syncwarp();
            if (threadIdx.x % WARP == 0) mbarrier_arrive(shared.empty(stage));
        }
        if constexpr (GROUP > 0)
            tile.write(sum);
        else
            tile.write(c);
    }
}

}  // namespace bminf

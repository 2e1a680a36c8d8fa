// A few rows by wgmma. A tile of up to 64 channels of the weight is its left operand and the rows of x are the right
// one. Warps without channels multiply zeros, or what lies behind the tile in shared memory. Codes pass through
// registers, where they become fp16.
#pragma once
#include "common/wgmma.cuh"
#include "gemm/skinny_float_gemm_hopper.cuh"

namespace bminf {

// The fragments of 64 columns of a warp's 16 rows of codes, as fp16. row: the shared address of this lane's row and
// columns in the box, with the piece that the swizzle puts there; piece: the first of the 64 columns' four pieces.
__device__ __forceinline__ void load_fragments(unsigned (&a)[BLOCK / STEP][4], unsigned row, int piece) {
#pragma unroll
    for (int i = 0; i < BLOCK / STEP; ++i) {
        const unsigned from = row ^ (piece + i) << 4;
        halves_of_codes(two_codes(from, from + 8 * ROW), a[i][0], a[i][1]);
        halves_of_codes(two_codes(from + 8, from + 8 * ROW + 8), a[i][2], a[i][3]);
    }
}

// The warpgroup that multiplies and writes. Warp w has 16 rows of each tile.
template <class W, int TILES, int GROUP, class S, int EPILOGUE, int F>
__device__ __forceinline__ void wgmma_warps(
    const SharedMemory<W, GROUP, S>& shared, const WorkTiles& work, const Outputs& outputs) {
    using Contents = Stage<W, GROUP, S>;
    constexpr bool FROM_CODES = sizeof(W) == 1, SCALED = FROM_CODES && GROUP == 0;
    constexpr int BLOCKS = Contents::BLOCKS, STEPS = BLOCK / STEP;
    // Chains of groups that end are added while the next ones are computed, so these have accumulators of their own.
    constexpr int IN_BLOCK = GROUP && GROUP < BLOCK ? BLOCK / GROUP : 1, CHAINS = GROUP ? 2 * IN_BLOCK : 1;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, r = lane / 4;
    const bool is_active = warp * STEP < shared.channels;
    const unsigned own_row = (warp * STEP + r) * ROW + (r << 4) + lane % 4 * 2;
    unsigned a[2][STEPS][4] = {};
    PipelineState pipe(shared.stages);
    for (int t = 0; t < work.count(); ++t) {
        const TileOutputs<EPILOGUE, F, SCALED> tile(outputs, work.tile(t) * shared.channels);
        float c[CHAINS][TILES][4], sum[TILES][4] = {};
        int previous = 0;
        // Adds the chains that ended in block `block` of a stage.
        const auto fold = [&](int step, int block, int stage) {
            if constexpr (GROUP > 0) {
#pragma unroll
                for (int g = 0; g < IN_BLOCK; ++g) {
                    if (IN_BLOCK == 1 && (block + 1) * BLOCK % GROUP != 0) continue;
                    const int group = IN_BLOCK == 1 ? block * BLOCK / GROUP : block * IN_BLOCK + g;
                    if (step * Contents::GROUPS + group >= outputs.groups) continue;
                    float (&chain)[TILES][4] = c[group % CHAINS];
                    warpgroup_fence_operand(chain);
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const float scale = group_scale<S, EPILOGUE == GATED>(shared, stage, group, h);
#pragma unroll
                        for (int n = 0; n < TILES; ++n)
#pragma unroll
                            for (int j = 2 * h; j < 2 * h + 2; ++j)
                                sum[n][j] = add_group(sum[n][j], scale, chain[n][j]);
                    }
                }
            }
        };
#pragma unroll 1
        for (int step = 0; step < work.steps; ++step, pipe.next()) {
            mbarrier_wait(shared.weight_full(pipe.index), pipe.phase);
            if (!shared.resident) mbarrier_wait(shared.activations_full(pipe.index), pipe.phase);
            const unsigned weight = shared.weight(pipe.index);
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b) {
                const int box = b / Contents::IN_BOX, in_box = b % Contents::IN_BOX;
                unsigned (&fragments)[STEPS][4] = a[b % 2];
                if constexpr (FROM_CODES)
                    if (is_active) load_fragments(fragments, weight + box * shared.box + own_row, in_box * STEPS);
                const unsigned long long x = make_smem_desc(shared.activations(step, pipe.index, b), 0);
                const unsigned long long w = make_smem_desc(weight + box * shared.box, 0);
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < STEPS; ++i) {
                    const int column = b * BLOCK + i * STEP;
                    float (&chain)[TILES][4] = c[GROUP ? column / (GROUP ? GROUP : 1) % CHAINS : 0];
                    const bool add = GROUP ? column % (GROUP ? GROUP : 1) != 0 : step + b + i > 0;
                    if constexpr (FROM_CODES)
                        wgmma_nt(chain, fragments[i], x + i * 2, add);
                    else
                        wgmma_nt(chain, w + i * 2, x + i * 2, add);
                }
                wgmma_commit_group();
                wgmma_wait_group<1>();  // the block before is complete
                if constexpr (GROUP > 0) {
                    if (b > 0) fold(step, b - 1, pipe.index);
                } else if (b == 0 && step > 0 && lane == 0) {
                    mbarrier_arrive(shared.empty(previous));
                }
            }
            previous = pipe.index;
            if constexpr (GROUP > 0) {
                wgmma_wait_group<0>();
                fold(step, BLOCKS - 1, previous);
                __syncwarp();
                if (lane == 0) mbarrier_arrive(shared.empty(previous));
            }
        }
        if constexpr (GROUP == 0) {
            wgmma_wait_group<0>();
            warpgroup_fence_operand(c[0]);
            if (lane == 0) mbarrier_arrive(shared.empty(previous));
        }
        if (!is_active) continue;
        if constexpr (GROUP > 0)
            tile.write(sum);
        else
            tile.write(c[0]);
    }
}

}  // namespace bminf

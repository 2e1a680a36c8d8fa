// Products with float activations for many rows by TMA and wgmma, on compute capability 9.0.
//
//     out = epilogue(w_scale * (x @ w.T) + bias), see float_gemm.cuh
//
// x: fp16 [rows, k]; w: fp16 or int8 [n, k]; w_scale: fp32 [n], or fp16 or fp32 [groups, n] with a scale for GROUP
// columns; bias: fp32 [n]; out: [rows, n], or [rows, n / 2] of a gated layer.
//
// The kernel is persistent and warp-specialised: each block computes tiles of CHANNELS channels and N rows, one after
// another. One thread loads BLOCK columns of both operands per stage by TMA into a pipeline. Two warpgroups multiply 64
// channels each: the weight is the left operand of wgmma, so codes can pass through registers, where they become fp16;
// while one warpgroup converts, the other multiplies. Each writes its part of a tile through shared memory by TMA. Of a
// gated layer, 8 channels of the gate and 8 of up are 16 rows of a tile, so that one thread has both sums of an output.
//
// With CLUSTER == 2 the two blocks have neighbouring channels and the same rows of x: each loads half of these and
// multicasts that to both, which halves the reads of x from L2.
#include "common/async.cuh"
#include "common/cluster.cuh"
#include "common/common.cuh"
#include "common/wgmma.cuh"
#include "constants/float_gemm_hopper.cuh"
#include "gemm/float_gemm.cuh"
#include "gemm/float_gemm_hopper.cuh"

namespace bminf {

constexpr int GROUPS_OF_WARPS = CHANNELS / 64;
constexpr int WARPS = GROUPS_OF_WARPS * WARPGROUP / WARP;  // that multiply
constexpr int EARLY = 2;  // stages of the weight that are loaded before the input is complete

// ---- the pipeline of operands ------------------------------------------------------------------------------------

// A circular buffer of `count` stages, each with N rows of x, CHANNELS rows of the weight, and the scales of the groups
// in its columns. A stage has two barriers: `full`, when its copies have arrived, and `empty`, when all multiplying
// warps of the cluster have read it.
template <class W, int N, int CLUSTER, int GROUP, class S, bool IS_GATED>
struct Pipeline {
    static constexpr int X_BYTES = N * BLOCK * 2, W_BYTES = CHANNELS * BLOCK * sizeof(W);
    static constexpr int GROUPS = GROUP == 0 ? 0 : GROUP < BLOCK ? BLOCK / GROUP : 1;
    static constexpr int MATRICES = IS_GATED ? 2 : 1, SCALE_ROW = CHANNELS / MATRICES * sizeof(S);
    static constexpr int SCALE_BYTES = GROUPS * MATRICES * SCALE_ROW;
    static constexpr int BYTES = X_BYTES + W_BYTES + (SCALE_BYTES + 1023) / 1024 * 1024;
    unsigned tiles, barriers;
    PipelineState state;

    __device__ __forceinline__ Pipeline(unsigned tiles, unsigned barriers, int count)
        : tiles(tiles),
          barriers(barriers),
          state(count) {}
    __device__ __forceinline__ unsigned x() const { return tiles + state.index * BYTES; }
    __device__ __forceinline__ unsigned w() const { return x() + X_BYTES; }
    __device__ __forceinline__ unsigned scales(int matrix) const {
        return w() + W_BYTES + matrix * (GROUPS * SCALE_ROW);
    }
    __device__ __forceinline__ unsigned full() const { return barriers + state.index * 16; }
    __device__ __forceinline__ unsigned empty() const { return full() + 8; }
    __device__ __forceinline__ void init() const {
        for (int i = 0; i < state.count; ++i) {
            mbarrier_init(barriers + i * 16, 1);
            mbarrier_init(barriers + i * 16 + 8, WARPS * CLUSTER);
        }
        fence_mbarrier_init();
    }
    // This warp has read the stage `index`: arrives at its `empty` barrier in every block of the cluster.
    __device__ __forceinline__ void release(int index) const {
        const unsigned barrier = barriers + index * 16 + 8, lane = threadIdx.x % WARP;
        __syncwarp();
        if constexpr (CLUSTER == 1) {
            if (lane == 0) mbarrier_arrive(barrier);
        } else if (lane < CLUSTER) {
            mbarrier_arrive_remote(barrier, lane);
        }
    }
    __device__ __forceinline__ int previous() const { return state.index == 0 ? state.count - 1 : state.index - 1; }
};

// ---- the order of tiles ------------------------------------------------------------------------------------------

// The tiles of one cluster, of row_tiles * channel_tiles; each block has CHANNELS channels of one. Consecutive tiles
// run down a band of `band` row tiles before they go on to the next channels, so that blocks that run at the same time
// share parts of the weight in L2.
template <int N, int CLUSTER>
struct TileScheduler {
    int row_tiles, channel_tiles, band, index;

    __device__ __forceinline__ TileScheduler(int row_tiles, int channel_tiles, int band)
        : row_tiles(row_tiles),
          channel_tiles(channel_tiles),
          band(band),
          index(blockIdx.x / CLUSTER) {}
    __device__ __forceinline__ bool valid() const { return index < row_tiles * channel_tiles; }
    __device__ __forceinline__ void next() { index += gridDim.x / CLUSTER; }
    // (first row of x, first channel) of this block's tile.
    __device__ __forceinline__ int2 origin() const {
        const int first = index / (band * channel_tiles) * band, inside = index % (band * channel_tiles);
        const int in_band = min(band, row_tiles - first);
        const int channel = inside / in_band * CLUSTER + (CLUSTER > 1 ? block_rank_in_cluster() : 0);
        return make_int2((first + inside % in_band) * N, channel * CHANNELS);
    }
};

// ---- the epilogue ------------------------------------------------------------------------------------------------

// Writes the box to (column, row), or adds it there; elements outside the matrix are left out.
template <int EPILOGUE>
__device__ __forceinline__ void tma_store_2d(unsigned source, const TensorMap& map, int column, int row) {
    if constexpr (EPILOGUE == ADD)
        asm volatile(
            "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map),
            "r"(column), "r"(row), "r"(source)
            : "memory");
    else
        asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map),
                     "r"(column), "r"(row), "r"(source)
                     : "memory");
}

__device__ __forceinline__ void tma_store_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until at most N of this thread's groups of stores have not yet read their shared memory.
template <int N>
__device__ __forceinline__ void tma_store_wait() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

// Stores four [8, 8] matrices of fp16, transposed: a lane's register has of column t / 4 of a stored matrix the rows t
// % 4 * 2 and the next one. Lane t gives the address of row t % 8 of matrix t / 8.
__device__ __forceinline__ void stmatrix_x4_trans(unsigned row, const unsigned (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(x[0]),
                 "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
}

__device__ __forceinline__ void sync_warpgroup(int warpgroup) {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + warpgroup), "n"(WARPGROUP) : "memory");
}

// The place of 16 bytes in a box with rows of WIDTH bytes and the swizzle of that width.
template <int WIDTH>
__device__ __forceinline__ unsigned place(int row, int piece) {
    const unsigned offset = row * WIDTH + piece * 16;
    return offset ^ (offset >> 3 & (WIDTH - 16));
}

// Writes the sums of a warpgroup, of 64 channels and N rows, CHUNK rows at a time through two buffers at `staging`.
// Boxes of the result have rows of 128 bytes: 64 channels in fp16 or 32 in fp32; of a gated layer 64 bytes, 32 outputs.
template <int EPILOGUE, int F, bool SCALED, int N>
struct TileWriter {
    static constexpr bool IS_GATED = EPILOGUE == GATED, IS_FLOAT = EPILOGUE == ADD || EPILOGUE == TO_FLOAT;
    static constexpr int WIDTH = IS_GATED ? 64 : 128, BOX = CHUNK * WIDTH, BOXES = IS_FLOAT ? 2 : 1;
    static constexpr int TILES = CHUNK / 8;
    const TensorMap& map;
    unsigned staging;
    const ChannelOperands (&channels)[2];
    bool is_biased;

    __device__ __forceinline__ float value(float sum, int half) const {
        return output_value<SCALED>(sum, channels[half], is_biased);
    }
    // What a pair of neighbouring rows of a channel has in fp16.
    __device__ __forceinline__ unsigned pair(const float* c, int half) const {
        float y[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            y[i] = value(c[half * 2 + i], half);
            if constexpr (EPILOGUE == ACTIVATED) y[i] = activate<F>(rounded(y[i]));
            if constexpr (IS_GATED) y[i] = gated<F>(y[i], value(c[2 + i], 1));
        }
        return pack_half2(y[0], y[1]);
    }
    __device__ __forceinline__ void write_chunk(const float (&c)[N / 8][4], int first, unsigned box) const {
        const int warp = threadIdx.x % WARPGROUP / WARP, lane = threadIdx.x % WARP, r = lane / 4, q = lane % 4 * 2;
        if constexpr (IS_FLOAT) {
            const unsigned part = box + warp / 2 * BOX;
#pragma unroll
            for (int t = 0; t < TILES; ++t)
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float y = value(c[first + t][j], j / 2);
                    const int row = t * 8 + q + j % 2, channel = warp % 2 * 16 + j / 2 * 8 + r;
                    st_shared_float(
                        part + place<WIDTH>(row, channel / 4) + channel % 4 * 4, EPILOGUE == ADD ? rounded(y) : y);
                }
        } else if constexpr (IS_GATED) {
            unsigned x[4];
#pragma unroll
            for (int t = 0; t < TILES; ++t) x[t] = pair(c[first + t], 0);
            stmatrix_x4_trans(box + place<WIDTH>(lane, warp), x);
        } else {
#pragma unroll
            for (int t = 0; t < TILES; t += 2) {
                const float *a = c[first + t], *b = c[first + t + 1];
                const unsigned x[4] = {pair(a, 0), pair(a, 1), pair(b, 0), pair(b, 1)};
                stmatrix_x4_trans(box + place<WIDTH>(t * 8 + lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2), x);
            }
        }
    }
    // To (row, column) of the result.
    __device__ __forceinline__ void write(const float (&c)[N / 8][4], int row, int column, int rows) const {
        const int warpgroup = threadIdx.x / WARPGROUP;
        const bool issues = threadIdx.x % WARPGROUP == 0;
#pragma unroll
        for (int i = 0; i < N / CHUNK; ++i) {
            if (row + i * CHUNK >= rows) break;
            const unsigned box = staging + i % 2 * (BOXES * BOX);
            if (issues) i == 0 ? tma_store_wait<0>() : tma_store_wait<1>();
            sync_warpgroup(warpgroup);
            write_chunk(c, i * TILES, box);
            fence_proxy_async();
            sync_warpgroup(warpgroup);
            if (issues) {
#pragma unroll
                for (int b = 0; b < BOXES; ++b)
                    tma_store_2d<EPILOGUE>(box + b * BOX, map, column + b * 32, row + i * CHUNK);
                tma_store_commit_group();
            }
        }
    }
};

// ---- the kernel --------------------------------------------------------------------------------------------------

// The fragments of the 64 columns of a stage for a warp's 16 rows of codes, as fp16. row: the shared address of this
// lane's row and columns, with the piece that the 64-byte swizzle puts there.
__device__ __forceinline__ void load_fragments(unsigned (&a)[BLOCK / STEP][4], unsigned row) {
#pragma unroll
    for (int i = 0; i < BLOCK / STEP; ++i) {
        const unsigned from = row ^ i << 4;
        halves_of_codes(two_codes(from, from + 8 * BLOCK), a[i][0], a[i][1]);
        halves_of_codes(two_codes(from + 8, from + 8 * BLOCK + 8), a[i][2], a[i][3]);
    }
}

// GROUP: columns of a scale, of type S; 0: each channel has one. F: the function of GATED and ACTIVATED. Tensor maps:
// see the launcher. `steps` stages cover a row of x. row_tiles, channel_tiles and `band`, see TileScheduler, count the
// tiles of a cluster. `stages`: of the pipeline. Dynamic shared memory: the pipeline; four boxes of a result for each
// warpgroup; 16 bytes for each stage.
template <class W, int GROUP, class S, int N, int CLUSTER, int EPILOGUE, int F>
__global__ void __launch_bounds__((GROUPS_OF_WARPS + 1) * WARPGROUP, 1) float_gemm_hopper(
    const float* w_scale, const float* bias, int rows, int n, int k_all, int steps, int row_tiles, int channel_tiles,
    int band, int stages, const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
    const __grid_constant__ TensorMap scale_map, const __grid_constant__ TensorMap out_map) {
    constexpr bool IS_GATED = EPILOGUE == GATED, FROM_CODES = sizeof(W) == 1, SCALED = FROM_CODES && GROUP == 0;
    using Writer = TileWriter<EPILOGUE, F, SCALED, N>;
    using Operands = Pipeline<W, N, CLUSTER, GROUP, S, IS_GATED>;
    extern __shared__ __align__(1024) char shared[];
    const unsigned tiles = cast_smem_ptr_to_uint(shared), staging = tiles + stages * Operands::BYTES;
    Operands pipeline(tiles, staging + GROUPS_OF_WARPS * 2 * Writer::BOXES * Writer::BOX, stages);
    if (threadIdx.x == 0) pipeline.init();
    __syncthreads();
    cluster_sync<CLUSTER>();
    launch_dependent_grids();
    TileScheduler<N, CLUSTER> tile(row_tiles, channel_tiles, band);
    const int warp = threadIdx.x / WARP, outputs = IS_GATED ? n / 2 : n;
    if (warp >= WARPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == WARPS * WARP) {
            const auto load_weight = [&](int k, int first) {
                const unsigned barrier = pipeline.full();
                mbarrier_arrive_expect_tx(barrier, Operands::X_BYTES + Operands::W_BYTES + Operands::SCALE_BYTES);
                if constexpr (IS_GATED)
                    tma_load_4d(pipeline.w(), w_map, k * BLOCK, first / STEP, barrier);
                else
                    tma_load_2d(pipeline.w(), w_map, k * BLOCK, first, barrier);
                if constexpr (GROUP > 0)
#pragma unroll
                    for (int m = 0; m < Operands::MATRICES; ++m)
                        tma_load_2d(
                            pipeline.scales(m), scale_map, m * outputs + first / Operands::MATRICES, k * BLOCK / GROUP,
                            barrier);
            };
            // The first stages of the weight are loaded before the kernel waits for its input.
            const int early = min(EARLY, steps);
            if (tile.valid())
                for (int k = 0; k < early; ++k, pipeline.state.next()) load_weight(k, tile.origin().y);
            pipeline.state = PipelineState(stages);
            wait_on_dependent_grids();
            for (int count = 0; tile.valid(); tile.next()) {
                const int2 origin = tile.origin();
#pragma unroll 1
                for (int k = 0; k < steps; ++k, ++count, pipeline.state.next()) {
                    if (count >= early) {
                        mbarrier_wait(pipeline.empty(), pipeline.state.phase ^ 1);
                        load_weight(k, origin.y);
                    }
                    if constexpr (CLUSTER > 1) {
                        const int half = N / CLUSTER * block_rank_in_cluster();
                        tma_load_2d_multicast(
                            pipeline.x() + half * BLOCK * 2, x_map, k * BLOCK, origin.x + half, pipeline.full());
                    } else {
                        tma_load_2d(pipeline.x(), x_map, k * BLOCK, origin.x, pipeline.full());
                    }
                }
            }
        }
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        wait_on_dependent_grids();
        constexpr int PARTS = GROUP && GROUP < BLOCK ? BLOCK / GROUP : 1, STEPS = BLOCK / STEP / PARTS;
        const int lane = threadIdx.x % WARP, r = lane / 4, warpgroup = warp / 4;
        const unsigned boxes = staging + warpgroup * 2 * Writer::BOXES * Writer::BOX;
        const unsigned own_row = (warp * STEP + r) * BLOCK + (r / 2 % 4 << 4) + lane % 4 * 2;
        for (; tile.valid(); tile.next()) {
            const int2 origin = tile.origin();
            const int channel = IS_GATED ? origin.y / 2 + warp * 8 + r : origin.y + warp * STEP + r;
            ChannelOperands channels[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int at = channel + h * (IS_GATED ? outputs : 8);
                const bool inside = (IS_GATED ? channel : at) < outputs;
                channels[h].scale = SCALED && inside ? __ldg(w_scale + at) : 0.0f;
                channels[h].bias = bias && inside ? __ldg(bias + at) : 0.0f;
            }
            float c[N / 8][4], sum[GROUP ? N / 8 : 1][4] = {};
#pragma unroll 1
            for (int k = 0; k < steps; ++k, pipeline.state.next()) {
                mbarrier_wait(pipeline.full(), pipeline.state.phase);
                const unsigned long long x = make_smem_desc(pipeline.x(), 0);
                const unsigned long long w = make_smem_desc(pipeline.w() + warpgroup * 64 * BLOCK * 2, 0);
                unsigned a[BLOCK / STEP][4];
                if constexpr (FROM_CODES) load_fragments(a, pipeline.w() + own_row);
#pragma unroll
                for (int part = 0; part < PARTS; ++part) {
                    wgmma_fence();
#pragma unroll
                    for (int i = part * STEPS; i < (part + 1) * STEPS; ++i) {
                        const bool add = GROUP ? (k * BLOCK + i * STEP) % (GROUP ? GROUP : 1) != 0 : k + i > 0;
                        if constexpr (FROM_CODES)
                            wgmma_nt(c, a[i], x + i * 2, add);
                        else
                            wgmma_nt(c, w + i * 2, x + i * 2, add);
                    }
                    wgmma_commit_group();
                    if constexpr (FROM_CODES) wgmma_wait_group<0>();
                    if constexpr (GROUP > 0) {
                        const int end = k * BLOCK + (part + 1) * STEPS * STEP;
                        if (GROUP > BLOCK ? end % GROUP != 0 && k + 1 < steps : end - GROUP >= k_all) continue;
                        warpgroup_fence_operand(c);
                        float scale[2];
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            const int at = IS_GATED ? warp * 8 + r : warp * STEP + r + h * 8;
                            scale[h] = ld_shared_scale<S>(
                                pipeline.scales(IS_GATED ? h : 0) + part * Operands::SCALE_ROW + at * sizeof(S));
                        }
#pragma unroll
                        for (int i = 0; i < N / 8; ++i)
#pragma unroll
                            for (int j = 0; j < 4; ++j) sum[i][j] = add_group(sum[i][j], scale[j / 2], c[i][j]);
                    }
                }
                if constexpr (FROM_CODES) {
                    pipeline.release(pipeline.state.index);
                } else {
                    wgmma_wait_group<1>();
                    if (k > 0) pipeline.release(pipeline.previous());
                }
            }
            if constexpr (!FROM_CODES) {
                wgmma_wait_group<0>();
                pipeline.release(pipeline.previous());
            }
            warpgroup_fence_operand(c);
            const Writer writer = {out_map, boxes, channels, bias != nullptr};
            const int column = (origin.y + warpgroup * 64) / (IS_GATED ? 2 : 1);
            if constexpr (GROUP > 0)
                writer.write(sum, origin.x, column, rows);
            else
                writer.write(c, origin.x, column, rows);
        }
        if (threadIdx.x % WARPGROUP == 0) tma_store_wait<0>();
        __syncwarp();
    }
    if constexpr (CLUSTER > 1) cluster_sync<CLUSTER>();  // other blocks write to this block's shared memory
}

}  // namespace bminf

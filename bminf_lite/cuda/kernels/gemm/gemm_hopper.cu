// int8 GEMM with a fused epilogue for many rows, on compute capability 9.0:
//
//     y = x_scale[row] * (w_scale[channel] * (x @ w.T)) + bias[channel]
//     out = fp16(y) or bf16(y), or out += fp16(y) in fp32 (the residual stream), or out = fp16(f(fp16(gate)) *
//     fp16(up))
//
// x: int8 [rows, in]; w: int8 [channels, in]; out: [rows, columns]. For a gated layer the first half of the channels is
// the gate, the second half up, and columns = channels / 2; else columns = channels. The int32 sums stay in registers.
//
// The kernel is persistent and warp-specialised: each block computes tiles of BLOCK_M by BLOCK_N one after another.
// One thread loads BLOCK_K columns of both operands per stage by TMA into a pipeline; two warpgroups multiply 64 rows
// each and write the tile through shared memory by TMA.
//
// There are two kinds of clusters. With CLUSTER == 2 the two blocks have neighbouring row tiles and the same tile of
// the weight: each loads half of it and multicasts that to both, which halves the reads of the weight from L2. With
// SPLIT_K > 1, for products with fewer tiles than SMs, the blocks share one tile: each sums over a part of the columns,
// then they exchange sums, and each finishes a part of the tile.
#include "common/async.cuh"
#include "common/bfloat16.cuh"
#include "common/cluster.cuh"
#include "common/common.cuh"
#include "common/wgmma.cuh"
#include "constants/epilogue.cuh"
#include "constants/gemm_hopper.cuh"

namespace bminf {

constexpr int WARPS = 2 * WARPGROUP / WARP;  // that multiply
constexpr int BAND = 16;                     // row tiles that are computed together, see TileScheduler
constexpr int EARLY = 2;                     // stages of the weight that are loaded before the input is complete

// ---- the pipeline of operands ------------------------------------------------------------------------------------

// A circular buffer of stages, each with BLOCK_M rows of the activations and then BLOCK_N rows of the weight. A stage
// has two barriers: `full`, when its copies have arrived, and `empty`, when all multiplying warps of the cluster have
// read it.
template <int BLOCK_N, int CLUSTER>
struct Pipeline {
    static constexpr int BYTES = (BLOCK_M + BLOCK_N) * BLOCK_K, COUNT = PIPELINE_BYTES / BYTES;
    unsigned tiles, barriers;
    int stage = 0;
    unsigned phase = 0;

    __device__ __forceinline__ Pipeline(unsigned tiles, unsigned barriers) : tiles(tiles), barriers(barriers) {}
    __device__ __forceinline__ unsigned x() const { return tiles + stage * BYTES; }
    __device__ __forceinline__ unsigned w() const { return x() + BLOCK_M * BLOCK_K; }
    __device__ __forceinline__ unsigned full() const { return barriers + stage * 16; }
    __device__ __forceinline__ unsigned empty() const { return full() + 8; }
    __device__ __forceinline__ void next() {
        if (++stage == COUNT) stage = 0, phase ^= 1;
    }
    __device__ __forceinline__ void init() const {
        for (int i = 0; i < COUNT; ++i) {
            mbarrier_init(barriers + i * 16, 1);
            mbarrier_init(barriers + i * 16 + 8, WARPS * CLUSTER);
        }
        fence_mbarrier_init();
    }
    // This warp has read the previous stage: arrives at its `empty` barrier in every block of the cluster.
    __device__ __forceinline__ void release_previous() const {
        const int previous = stage == 0 ? COUNT - 1 : stage - 1;
        const unsigned barrier = barriers + previous * 16 + 8, lane = threadIdx.x % WARP;
        if constexpr (CLUSTER == 1) {
            if (lane == 0) mbarrier_arrive(barrier);
        } else if (lane < CLUSTER) {
            mbarrier_arrive_remote(barrier, lane);
        }
    }
};

// ---- the order of tiles ------------------------------------------------------------------------------------------

// The tiles of one cluster, of row_tiles * column_tiles; each block has `height` rows of one. Consecutive tiles run
// down a band of BAND row tiles before they go on to the next columns, so that blocks that run at the same time share
// parts of the weight in L2.
template <int COLUMNS, int CLUSTER, int SPLIT_K>
struct TileScheduler {
    int height, row_tiles, column_tiles, index;

    __device__ __forceinline__ TileScheduler(int height, int row_tiles, int column_tiles)
        : height(height),
          row_tiles(row_tiles),
          column_tiles(column_tiles),
          index(blockIdx.x / (CLUSTER * SPLIT_K)) {}
    __device__ __forceinline__ bool valid() const { return index < row_tiles * column_tiles; }
    __device__ __forceinline__ void next() { index += gridDim.x / (CLUSTER * SPLIT_K); }
    // (first row, first column) of this block's tile.
    __device__ __forceinline__ int2 origin() const {
        constexpr int PER_BAND = BAND / CLUSTER;  // tiles of a cluster
        const int band = index / (PER_BAND * column_tiles), inside = index % (PER_BAND * column_tiles);
        const int in_band = min(PER_BAND, row_tiles - band * PER_BAND);
        const int tile = (band * PER_BAND + inside % in_band) * CLUSTER + (CLUSTER > 1 ? block_rank_in_cluster() : 0);
        return make_int2(tile * height, inside / in_band * COLUMNS);
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
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until at most N of this thread's stores have not yet read their shared memory.
template <int N>
__device__ __forceinline__ void tma_store_wait() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

// The scales and biases of the two neighbouring channels that a thread has in each of COUNT groups of eight channels.
template <int COUNT, bool BIAS>
struct Channels {
    float2 scale[COUNT], bias[BIAS ? COUNT : 1];

    __device__ __forceinline__ float2 values(const int* sums, float x_scale, int n) const {
        float2 y = {
            scaled(__int2float_rn(sums[0]), x_scale, scale[n].x), scaled(__int2float_rn(sums[1]), x_scale, scale[n].y)};
        if constexpr (BIAS) y.x = __fadd_rn(y.x, bias[n].x), y.y = __fadd_rn(y.y, bias[n].y);
        return y;
    }
};

// The operands of the epilogue. A gated layer's channels of up lie `columns` behind those of the gate.
struct EpilogueScales {
    const float *x_scale, *w_scale, *bias;
    int rows, columns, channels;

    __device__ __forceinline__ float row(int y) const { return y < rows ? x_scale[y] : 0; }

    template <bool GATED, int COUNT, bool BIAS>
    __device__ __forceinline__ void load(Channels<COUNT, BIAS>& c, int column) const {
        constexpr int HALF = GATED ? COUNT / 2 : COUNT;
#pragma unroll
        for (int n = 0; n < COUNT; ++n) {
            const int first = column + n % HALF * 8 + threadIdx.x % 4 * 2 + (n < HALF ? 0 : columns);
            const int from = min(first, channels - 2);
            c.scale[n] = *reinterpret_cast<const float2*>(w_scale + from);
            if constexpr (BIAS) c.bias[n] = *reinterpret_cast<const float2*>(bias + from);
        }
    }
};

template <int ACTIVATION>
__device__ __forceinline__ float2 gated(float2 gate, float2 up) {
    return {gated<ACTIVATION>(gate.x, up.x), gated<ACTIVATION>(gate.y, up.y)};
}

// Stores four [8, 8] matrices of fp16, as two accumulator tiles hold them; lane t gives the address of row t % 8 of
// matrix t / 8.
__device__ __forceinline__ void stmatrix_x4(unsigned row, const unsigned (&left)[2], const unsigned (&right)[2]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(left[0]),
                 "r"(left[1]), "r"(right[0]), "r"(right[1])
                 : "memory");
}

__device__ __forceinline__ void st_shared_v2(unsigned address, float2 y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(y.x), "f"(y.y) : "memory");
}

// How a tile is written, in groups of eight channels or columns: N groups of channels make WIDTH groups of columns, of
// which IN_BOX fill a box with rows of BOX_ROW bytes: as many, up to 128, as divide the tile. AT_ONCE groups of
// columns, CHANNELS groups of channels, are scaled together, while the scales of the next are loaded.
template <int EPILOGUE, int N>
struct EpilogueTile {
    static constexpr bool GATED = EPILOGUE == Epilogue::GATED, IS_FLOAT = EPILOGUE == ADD || EPILOGUE == TO_FLOAT;
    static constexpr int WIDTH = GATED ? N / 2 : N, GROUP = IS_FLOAT ? 32 : 16, ROW = WIDTH * GROUP;
    static constexpr int BOX_ROW = (ROW & -ROW) < 128 ? (ROW & -ROW) : 128, IN_BOX = BOX_ROW / GROUP;
    static constexpr int AT_ONCE = GATED && IN_BOX > 4 ? 4 : IN_BOX, CHANNELS = GATED ? 2 * AT_ONCE : AT_ONCE;

    // The place of a piece of 16 bytes in a box, with the swizzle of its rows' width.
    __device__ __forceinline__ static unsigned place(int row, int piece) {
        const unsigned offset = row * BOX_ROW + piece * 16;
        return offset ^ (offset >> 3 & (BOX_ROW - 16));
    }
};

// Scales a warp's 16 rows from (row, column) on and writes them box by box, through two boxes of shared memory at
// `staging`. `next` has the channels of the first columns.
template <int EPILOGUE, int ACTIVATION, int N, class Loaded>
__device__ __forceinline__ void write_tile(
    const int (&c)[N][4], const EpilogueScales& scaling, const float (&x_scale)[2], Loaded next, const TensorMap& map,
    int row, int column, unsigned staging) {
    using L = EpilogueTile<EPILOGUE, N>;
    const int lane = threadIdx.x % WARP, y = lane / 4, x = lane % 4;
#pragma unroll
    for (int first = 0; first < L::WIDTH; first += L::AT_ONCE) {
        const unsigned box = staging + first / L::IN_BOX % 2 * BOX;
        const Loaded channels = next;
        if (first + L::AT_ONCE < L::WIDTH) scaling.load<L::GATED>(next, column + (first + L::AT_ONCE) * 8);
        if (first % L::IN_BOX == 0) {
            if (lane == 0) tma_store_wait<1>();
            __syncwarp();
        }
#pragma unroll
        for (int n = 0; n < L::AT_ONCE; n += 2) {
            unsigned v[2][2];
            const int piece = first % L::IN_BOX + n;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int h = i % 2, m = n + i / 2;
                float2 value = channels.values(c[first + m] + 2 * h, x_scale[h], m);
                if constexpr (L::GATED)
                    value = gated<ACTIVATION>(
                        value, channels.values(c[first + m + N / 2] + 2 * h, x_scale[h], m + L::AT_ONCE));
                if constexpr (EPILOGUE == ADD) value = {rounded(value.x), rounded(value.y)};
                if constexpr (L::IS_FLOAT)
                    st_shared_v2(box + L::place(h * 8 + y, (piece + i / 2) * 2 + x / 2) + x % 2 * 8, value);
                else if constexpr (EPILOGUE == TO_BFLOAT16)
                    v[i / 2][h] = pack_bfloat162(value.x, value.y);
                else
                    v[i / 2][h] = pack_half2(value.x, value.y);
            }
            if constexpr (!L::IS_FLOAT) stmatrix_x4(box + L::place(lane % 16, piece + lane / 16), v[0], v[1]);
            __syncwarp();  // keeps the compiler from delaying all stores to the end, which would take too many
                           // registers
        }
        if ((first + L::AT_ONCE) % L::IN_BOX == 0) {
            fence_proxy_async();
            __syncwarp();
            if (lane == 0) tma_store_2d<EPILOGUE>(box, map, column + first / L::IN_BOX * L::IN_BOX * 8, row);
        }
    }
}

// Reduces a tile over the SPLIT_K blocks of the cluster. c: this block's sums over its part of the columns. mine: the
// total for this block's part of the channels, N / SPLIT_K groups of eight; of a gated layer half of them are gates and
// half up. buffer: shared memory for a tile of sums, which overlays the pipeline.
template <int SPLIT_K, bool GATED, int N>
__device__ __forceinline__ void exchange_sums(const int (&c)[N][4], int (&mine)[N / SPLIT_K][4], unsigned buffer) {
    constexpr int OWN = N / SPLIT_K, HALF = GATED ? OWN / 2 : OWN, PIECE = WARPS * WARP * 16;
    const unsigned rank = block_rank_in_cluster(), own = buffer + threadIdx.x * 16;
    cluster_sync<SPLIT_K>();
#pragma unroll
    for (int part = 0; part < SPLIT_K; ++part) {
        const unsigned remote = map_shared_rank(own + rank * OWN * PIECE, part);
#pragma unroll
        for (int n = 0; n < OWN; ++n)
            st_shared_cluster_v4(remote + n * PIECE, c[n / HALF * (N / 2) * GATED + part * HALF + n % HALF]);
    }
    cluster_sync<SPLIT_K>();
#pragma unroll
    for (int n = 0; n < OWN; ++n) {
        for (int i = 0; i < 4; ++i) mine[n][i] = 0;
#pragma unroll
        for (int part = 0; part < SPLIT_K; ++part) {
            const int4 sums = ld_shared_v4(own + (part * OWN + n) * PIECE);
            mine[n][0] += sums.x, mine[n][1] += sums.y, mine[n][2] += sums.z, mine[n][3] += sums.w;
        }
    }
}

// ---- the kernel --------------------------------------------------------------------------------------------------

// ACTIVATION: the function of GATED. BLOCK_N: channels of a tile, 128, 160, 192, 224 or 256, or with SPLIT_K 64, 96 or
// 128. Boxes of the tensor maps: x_map `height` rows of 128 columns; w_map BLOCK_N / 2 rows of 128 columns; out_map 16
// rows of BOX_ROW bytes. `height`: rows of a tile that are computed, a multiple of 16. `stages` stages cover a row of
// x. CLUSTER: 1 or 2; row_tiles and column_tiles count the tiles of a cluster (CLUSTER * height rows). SPLIT_K: with it
// CLUSTER is 1, there is one cluster for each tile, and stages >= SPLIT_K. Dynamic shared memory: PIPELINE_BYTES; two
// boxes for each multiplying warp; 16 bytes for each stage of the pipeline.
template <int EPILOGUE, int ACTIVATION, bool BIAS, int BLOCK_N, int CLUSTER, int SPLIT_K>
__global__ void __launch_bounds__(3 * WARPGROUP, 1) gemm_hopper(
    const float* x_scale, const float* w_scale, const float* bias, int rows, int columns, int channels, int stages,
    int height, int row_tiles, int column_tiles, const __grid_constant__ TensorMap x_map,
    const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap out_map) {
    static_assert(CLUSTER == 1 || SPLIT_K == 1, "the blocks of a cluster share the weight or a tile");
    constexpr int HALF = BLOCK_N / 2, COLUMNS = EPILOGUE == GATED ? HALF : BLOCK_N, OWN = BLOCK_N / 8 / SPLIT_K;
    extern __shared__ __align__(1024) char shared[];
    const unsigned tiles = cast_smem_ptr_to_uint(shared), staging = tiles + PIPELINE_BYTES;
    Pipeline<BLOCK_N, CLUSTER> pipeline(tiles, staging + WARPS * 2 * BOX);
    if (threadIdx.x == 0) pipeline.init();
    __syncwarp();
    cluster_sync<CLUSTER * SPLIT_K>();
    launch_dependent_grids();
    TileScheduler<COLUMNS, CLUSTER, SPLIT_K> tile(height, row_tiles, column_tiles);
    const int warp = threadIdx.x / WARP, part = SPLIT_K > 1 ? block_rank_in_cluster() : 0;
    const int from = stages * part / SPLIT_K, to = stages * (part + 1) / SPLIT_K;
    if (warp >= WARPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == WARPS * WARP) {
            const auto load_weight = [&](int k, int column) {
                mbarrier_arrive_expect_tx(pipeline.full(), (height + BLOCK_N) * BLOCK_K);
#pragma unroll
                for (int i = 0; i < 2 / CLUSTER; ++i) {
                    const int half = CLUSTER > 1 ? block_rank_in_cluster() : i;
                    const int row = column + half * (EPILOGUE == GATED ? columns : HALF);
                    const unsigned target = pipeline.w() + half * HALF * BLOCK_K;
                    if constexpr (CLUSTER > 1)
                        tma_load_2d_multicast(target, w_map, k * BLOCK_K, row, pipeline.full());
                    else
                        tma_load_2d(target, w_map, k * BLOCK_K, row, pipeline.full());
                }
            };
            // The first stages of the weight are loaded before the kernel waits for its input.
            const int early = min(EARLY, to - from);
            for (int k = from; k < from + early; ++k, pipeline.next()) load_weight(k, tile.origin().y);
            pipeline.stage = 0, pipeline.phase = 0;
            wait_on_dependent_grids();
            for (int count = 0; tile.valid(); tile.next()) {
                const int2 origin = tile.origin();
#pragma unroll 1
                for (int k = from; k < to; ++k, ++count, pipeline.next()) {
                    if (count >= early) {
                        mbarrier_wait(pipeline.empty(), pipeline.phase ^ 1);
                        load_weight(k, origin.y);
                    }
                    tma_load_2d(pipeline.x(), x_map, k * BLOCK_K, origin.x, pipeline.full());
                }
            }
        }
        __syncwarp();
        if constexpr (SPLIT_K > 1) cluster_sync<SPLIT_K>(), cluster_sync<SPLIT_K>();  // those of exchange_sums
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        wait_on_dependent_grids();
        const EpilogueScales scaling = {x_scale, w_scale, bias, rows, columns, channels};
        for (; tile.valid(); tile.next()) {
            const int2 origin = tile.origin();
            // Rows from `height` on are not loaded. Outside the matrix nothing is written.
            const int row = warp * 16 < height ? origin.x + warp * 16 : rows, mine = row + threadIdx.x % WARP / 4;
            const float scales[2] = {scaling.row(mine), scaling.row(mine + 8)};
            const int column = origin.y + part * (COLUMNS / SPLIT_K);
            Channels<EpilogueTile<EPILOGUE, OWN>::CHANNELS, BIAS> first;
            scaling.load<EPILOGUE == GATED>(first, column);
            int c[BLOCK_N / 8][4];
#pragma unroll 1
            for (int k = from; k < to; ++k) {
                mbarrier_wait(pipeline.full(), pipeline.phase);
                const unsigned long long x = make_smem_desc(pipeline.x() + warp / 4 * 64 * BLOCK_K, 0),
                                         w = make_smem_desc(pipeline.w(), 0);
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < BLOCK_K / 32; ++i) wgmma(c, x + i * 2, w + i * 2, k + i > from);
                wgmma_commit_group();
                wgmma_wait_group<1>();
                if (k > from) pipeline.release_previous();
                pipeline.next();
            }
            wgmma_wait_group<0>();
            warpgroup_fence_operand(c);
            pipeline.release_previous();
            const unsigned boxes = staging + warp * 2 * BOX;
            if constexpr (SPLIT_K > 1) {
                int sums[OWN][4];
                exchange_sums<SPLIT_K, EPILOGUE == GATED>(c, sums, tiles);
                write_tile<EPILOGUE, ACTIVATION>(sums, scaling, scales, first, out_map, row, column, boxes);
            } else {
                write_tile<EPILOGUE, ACTIVATION>(c, scaling, scales, first, out_map, row, column, boxes);
            }
        }
        if (threadIdx.x % WARP == 0) tma_store_wait<0>();
        __syncwarp();
    }
    if constexpr (CLUSTER > 1) cluster_sync<CLUSTER>();  // other blocks write to this block's shared memory
}

}  // namespace bminf

// Products of many int8 rows for compute capability 9.0, scaled as they leave the tensor cores: the int32 sums never
// see memory. A gated layer's product is gated there too, so that of its two halves one is written, and what belongs to
// the residual stream is added to it.
//
// A block stays for the whole product and computes tiles of 128 rows by BLOCK_N weight rows, one after another. One
// thread starts the copies of the next 128 columns of both operands into a pipeline of stages; two groups of four warps
// multiply, 64 rows each. Blocks of a cluster work on neighbouring rows with the same part of the weight: each copies
// its share of that part to all of them, which saves reads from the cache. Where rows are few and tiles therefore too,
// a cluster works on one tile instead: each block sums over a part of the columns, and all share the scaling.
#include "common/async.cuh"
#include "common/cluster.cuh"
#include "common/common.cuh"
#include "common/wgmma.cuh"
#include "constants/epilogue.cuh"
#include "constants/gemm_hopper.cuh"

namespace bminf {

constexpr int WARPS = 2 * WARPGROUP / WARP;
constexpr int BAND = 16;  // tiles of rows that share their parts of the weight while these are in the cache

__device__ __forceinline__ void store_sums(unsigned address, const int (&sums)[4]) {
    asm volatile("st.shared::cluster.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(sums[0]), "r"(sums[1]),
                 "r"(sums[2]), "r"(sums[3])
                 : "memory");
}

__device__ __forceinline__ void add_sums(unsigned address, int (&sums)[4]) {
    int v[4];
    asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(address)
                 : "memory");
    for (int i = 0; i < 4; ++i) sums[i] += v[i];
}

// ---- copies of tiles ---------------------------------------------------------------------------------------------

// A box into every block of a cluster of two, each of whose barriers expects it.
__device__ __forceinline__ void tma_load_2d_multicast(
    unsigned target, const TensorMap& map, int column, int row, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(target),
        "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(static_cast<unsigned short>(3))
        : "memory");
}

// The pipeline of stages: a tile of the activations, then the tile of the weight. For each stage one barrier says that
// it is full, and another that nobody in the cluster reads it any more.
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
    // A warp has read the stage before the present one: tell every block that writes there.
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

// ---- tiles of the result -----------------------------------------------------------------------------------------

// The tiles that a cluster computes, of row_tiles by column_tiles, in bands of neighbouring rows that pass over the
// weight together. SPLIT_K blocks compute each.
template <int COLUMNS, int CLUSTER, int SPLIT_K>
struct TileScheduler {
    int row_tiles, column_tiles, index;

    __device__ __forceinline__ TileScheduler(int row_tiles, int column_tiles)
        : row_tiles(row_tiles),
          column_tiles(column_tiles),
          index(blockIdx.x / (CLUSTER * SPLIT_K)) {}
    __device__ __forceinline__ bool valid() const { return index < row_tiles * column_tiles; }
    __device__ __forceinline__ void next() { index += gridDim.x / (CLUSTER * SPLIT_K); }
    // The first row and column of this block's tile.
    __device__ __forceinline__ int2 place() const {
        constexpr int TALL = BAND / CLUSTER;
        const int band = index / (TALL * column_tiles), inside = index % (TALL * column_tiles);
        const int tall = min(TALL, row_tiles - band * TALL);
        const int row = (band * TALL + inside % tall) * CLUSTER + (CLUSTER > 1 ? block_rank_in_cluster() : 0);
        return make_int2(row * BLOCK_M, inside / tall * COLUMNS);
    }
};

#define FOUR(i) "+r"(c[i][0]), "+r"(c[i][1]), "+r"(c[i][2]), "+r"(c[i][3])
#define FOURS_4(i) FOUR(i), FOUR(i + 1), FOUR(i + 2), FOUR(i + 3)
#define FOURS_16(i) FOURS_4(i), FOURS_4(i + 4), FOURS_4(i + 8), FOURS_4(i + 12)

// c = x @ w.T + (add ? c : 0), x [64, 32] and w [8 * N, 32].
__device__ __forceinline__ void wgmma(int (&c)[16][4], unsigned long long x, unsigned long long w, bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {" UP_TO_63 "}, %64, %65, add;\n}"
        : FOURS_16(0)
        : "l"(x), "l"(w), "r"(static_cast<int>(add)));
}

__device__ __forceinline__ void wgmma(int (&c)[32][4], unsigned long long x, unsigned long long w, bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k32.s32.s8.s8 {" UP_TO_127 "}, %128, %129, add;\n}"
        : FOURS_16(0), FOURS_16(16)
        : "l"(x), "l"(w), "r"(static_cast<int>(add)));
}

// ---- what leaves -------------------------------------------------------------------------------------------------

// Writes the box at (column, row), or adds it there, and leaves out what lies outside the matrix.
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

// Until shared memory has been read for all but the last N boxes that this thread writes.
template <int N>
__device__ __forceinline__ void tma_store_wait() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

// Scales, and biases, of a thread's two neighbours in each of COUNT times eight rows of the weight.
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

// What scales the sums. The rows of a gated layer's weight that are gated lie `columns` behind the others.
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
    return {
        activate<ACTIVATION>(rounded(gate.x)) * rounded(up.x), activate<ACTIVATION>(rounded(gate.y)) * rounded(up.y)};
}

__device__ __forceinline__ unsigned pack2(float2 y) {
    const __half2 h = __floats2half2_rn(y.x, y.y);
    return *reinterpret_cast<const unsigned*>(&h);
}

// Two pairs of 8 x 8 tiles of fp16 go to shared memory as products leave them in registers; each lane names one row.
__device__ __forceinline__ void stmatrix_x4(unsigned row, const unsigned (&left)[2], const unsigned (&right)[2]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(left[0]),
                 "r"(left[1]), "r"(right[0]), "r"(right[1])
                 : "memory");
}

__device__ __forceinline__ void store_pair(unsigned address, float2 y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(y.x), "f"(y.y) : "memory");
}

// A tile as it leaves: N * 8 rows of the weight make WIDTH * 8 columns, AT_ONCE * 8 of which are scaled while the
// scales of the next ones are loaded; IN_BOX * 8 fill a box.
template <int EPILOGUE, int N>
struct EpilogueTile {
    static constexpr bool GATED = EPILOGUE == Epilogue::GATED;
    static constexpr int WIDTH = GATED ? N / 2 : N, IN_BOX = EPILOGUE == ADD ? 4 : 8, AT_ONCE = GATED ? 4 : IN_BOX;
    static constexpr int CHANNELS = GATED ? 2 * AT_ONCE : AT_ONCE;
};

// A warp's 16 rows from (row, column) on, box after box, through two places in shared memory. `next` has the scales of
// the first columns.
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
                if constexpr (EPILOGUE == ADD)
                    store_pair(
                        box + (h * 8 + y) * 128 + (((piece + i / 2) * 2 + x / 2) ^ y) * 16 + x % 2 * 8,
                        {rounded(value.x), rounded(value.y)});
                else
                    v[i / 2][h] = pack2(value);
            }
            if constexpr (EPILOGUE != ADD)
                stmatrix_x4(box + lane % 16 * 128 + ((piece + lane / 16) ^ lane % 8) * 16, v[0], v[1]);
            __syncwarp();  // without it, the compiler keeps all values to the end and runs out of registers
        }
        if ((first + L::AT_ONCE) % L::IN_BOX == 0) {
            fence_proxy_async();
            __syncwarp();
            if (lane == 0) tma_store_2d<EPILOGUE>(box, map, column + first / L::IN_BOX * L::IN_BOX * 8, row);
        }
    }
}

// Adds up a tile's sums, of which each of SPLIT_K blocks has those over a part of the columns: this block gets a part
// of the tile, N / SPLIT_K * 8 rows of the weight, of a gated layer half of them from either half. `buffer` is as large
// as the tile, and was read by the products before.
template <int SPLIT_K, bool GATED, int N>
__device__ __forceinline__ void exchange(const int (&c)[N][4], int (&mine)[N / SPLIT_K][4], unsigned buffer) {
    constexpr int OWN = N / SPLIT_K, HALF = GATED ? OWN / 2 : OWN, PIECE = WARPS * WARP * 16;
    const unsigned rank = block_rank_in_cluster(), place = buffer + threadIdx.x * 16;
    cluster_sync<SPLIT_K>();
#pragma unroll
    for (int part = 0; part < SPLIT_K; ++part) {
        const unsigned there = map_shared_rank(place + rank * OWN * PIECE, part);
#pragma unroll
        for (int n = 0; n < OWN; ++n)
            store_sums(there + n * PIECE, c[n / HALF * (N / 2) * GATED + part * HALF + n % HALF]);
    }
    cluster_sync<SPLIT_K>();
#pragma unroll
    for (int n = 0; n < OWN; ++n) {
        for (int i = 0; i < 4; ++i) mine[n][i] = 0;
#pragma unroll
        for (int part = 0; part < SPLIT_K; ++part) add_sums(place + (part * OWN + n) * PIECE, mine[n]);
    }
}

// ---- the kernel --------------------------------------------------------------------------------------------------

// `rows` by `columns` of scaled(x @ w.T) + bias; `channels` are the rows of the weight. `x_map` is the activations int8
// [rows, in] in boxes of 128 by 128, `w_map` the weight int8 [channels, in] in boxes of BLOCK_N / 2 by 128, `out_map`
// the result in boxes of 16 rows of 128 bytes; `stages` of 128 columns cover `in`. BLOCK_N rows of the weight make a
// tile, 128 or 256. Blocks come in clusters of CLUSTER, 1 or 2, which compute row_tiles by column_tiles tiles; or of
// SPLIT_K, for CLUSTER 1, which compute one tile together. Then there is a cluster for each tile, and a stage for each
// part. Dynamic shared memory: the pipeline, two boxes per multiplying warp, 16 bytes per stage.
template <int EPILOGUE, int ACTIVATION, bool BIAS, int BLOCK_N, int CLUSTER, int SPLIT_K>
__global__ void __launch_bounds__(3 * WARPGROUP, 1) gemm_hopper(
    const float* x_scale, const float* w_scale, const float* bias, int rows, int columns, int channels, int stages,
    int row_tiles, int column_tiles, const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
    const __grid_constant__ TensorMap out_map) {
    static_assert(CLUSTER == 1 || SPLIT_K == 1, "blocks of a cluster share rows or sums");
    constexpr int SHARE = BLOCK_N / 2, COLUMNS = EPILOGUE == GATED ? SHARE : BLOCK_N, OWN = BLOCK_N / 8 / SPLIT_K;
    extern __shared__ __align__(1024) char shared[];
    const unsigned tiles = cast_smem_ptr_to_uint(shared), staging = tiles + PIPELINE_BYTES;
    Pipeline<BLOCK_N, CLUSTER> pipeline(tiles, staging + WARPS * 2 * BOX);
    if (threadIdx.x == 0) pipeline.init();
    __syncwarp();
    cluster_sync<CLUSTER * SPLIT_K>();
    launch_dependent_grids();
    wait_on_dependent_grids();
    TileScheduler<COLUMNS, CLUSTER, SPLIT_K> tile(row_tiles, column_tiles);
    const int warp = threadIdx.x / WARP, part = SPLIT_K > 1 ? block_rank_in_cluster() : 0;
    const int from = stages * part / SPLIT_K, to = stages * (part + 1) / SPLIT_K;
    if (warp >= WARPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == WARPS * WARP) {
            for (; tile.valid(); tile.next()) {
                const int2 place = tile.place();
#pragma unroll 1
                for (int k = from; k < to; ++k, pipeline.next()) {
                    mbarrier_wait(pipeline.empty(), pipeline.phase ^ 1);
                    mbarrier_arrive_expect_tx(pipeline.full(), pipeline.BYTES);
                    tma_load_2d(pipeline.x(), x_map, k * BLOCK_K, place.x, pipeline.full());
#pragma unroll
                    for (int i = 0; i < 2 / CLUSTER; ++i) {
                        const int share = CLUSTER > 1 ? block_rank_in_cluster() : i;
                        const int row = place.y + share * (EPILOGUE == GATED ? columns : SHARE);
                        const unsigned target = pipeline.w() + share * SHARE * BLOCK_K;
                        if constexpr (CLUSTER > 1)
                            tma_load_2d_multicast(target, w_map, k * BLOCK_K, row, pipeline.full());
                        else
                            tma_load_2d(target, w_map, k * BLOCK_K, row, pipeline.full());
                    }
                }
            }
        }
        __syncwarp();
        if constexpr (SPLIT_K > 1) cluster_sync<SPLIT_K>(), cluster_sync<SPLIT_K>();  // with those that exchange sums
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        const EpilogueScales scaling = {x_scale, w_scale, bias, rows, columns, channels};
        for (; tile.valid(); tile.next()) {
            const int2 place = tile.place();
            const int row = place.x + warp * 16, mine = row + threadIdx.x % WARP / 4;
            const float scales[2] = {scaling.row(mine), scaling.row(mine + 8)};
            const int column = place.y + part * (COLUMNS / SPLIT_K);
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
                exchange<SPLIT_K, EPILOGUE == GATED>(c, sums, tiles);
                write_tile<EPILOGUE, ACTIVATION>(sums, scaling, scales, first, out_map, row, column, boxes);
            } else {
                write_tile<EPILOGUE, ACTIVATION>(c, scaling, scales, first, out_map, row, column, boxes);
            }
        }
        if (threadIdx.x % WARP == 0) tma_store_wait<0>();
        __syncwarp();
    }
    if constexpr (CLUSTER > 1) cluster_sync<CLUSTER>();  // a block that others copy to and arrive at must not have gone
}

}  // namespace bminf

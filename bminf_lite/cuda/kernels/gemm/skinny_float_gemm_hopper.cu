// Products with float activations for a few rows (1 to 64) by TMA, on compute capability 9.0: decoding, which is
// memory-bound, because the weight is read once.
//
//     out = epilogue(w_scale * (x @ w.T) + bias), see float_gemm.cuh
//
// x: fp16 [rows, k], or of a single row the norm of an fp32 row; w: fp16 or int8 [n, k]; w_scale: fp32 [n], or fp16 or
// fp32 [groups, n] with a scale for GROUP columns; bias: fp32 [n]; out: [rows, n], or [rows, n / 2] of a gated layer.
//
// A tile has as many channels of the weight as divide it best among the blocks. Of a gated layer, 8 channels of the
// gate and 8 of up are 16 rows of a tile, so that one thread has both sums of an output.
//
// The kernel is warp-specialised. One thread loads the weight by TMA, and starts before the kernel waits for its input;
// another loads x; the other warps multiply and write, by mma.sync or by wgmma, which give the same bits. wgmma reads
// fp16 operands from shared memory; codes it would have to take from registers, which holds up the warps.
#include "common/async.cuh"
#include "common/common.cuh"
#include "constants/gemv.cuh"
#include "gemm/float_gemm_hopper.cuh"
#include "gemm/skinny_float_gemm_hopper.cuh"
#include "gemm/skinny_float_mma.cuh"
#include "gemm/skinny_float_wgmma.cuh"

namespace bminf {

constexpr int MMA_WARPS = 8;  // that multiply, at most
constexpr int NORM_THREADS = MMA_WARPS * WARP;

// The thread that loads the weight. `pipe` is the stage to be loaded next, `landing` the oldest one in flight.
template <class W, int GROUP, class S, bool IS_GATED>
struct WeightProducer {
    using Contents = Stage<W, GROUP, S>;
    const SharedMemory<W, GROUP, S>& shared;
    const WorkTiles& work;
    const TensorMap &map, &scale_map;
    int n, window;
    PipelineState pipe, landing;
    int tile = 0, step = 0, loaded = 0;

    __device__ __forceinline__ bool remaining() const { return tile < work.count(); }
    __device__ __forceinline__ void load() {
        if (loaded >= window) mbarrier_wait(shared.weight_full(landing.index), landing.phase), landing.next();
        if (loaded >= shared.stages) mbarrier_wait(shared.empty(pipe.index), pipe.phase ^ 1);
        const unsigned barrier = shared.weight_full(pipe.index), target = shared.weight(pipe.index);
        const int first = work.tile(tile) * shared.channels, channels = shared.channels;
        mbarrier_arrive_expect_tx(
            barrier, BOXES * shared.box + Contents::GROUPS * channels * static_cast<int>(sizeof(S)));
#pragma unroll
        for (int b = 0; b < BOXES; ++b) {
            const int column = step * Contents::COLUMNS + b * (ROW / static_cast<int>(sizeof(W)));
            if constexpr (IS_GATED)
                tma_load_4d_evict_first(target + b * shared.box, map, column, first / STEP, barrier);
            else
                tma_load_2d_evict_first(target + b * shared.box, map, column, first, barrier);
        }
        if constexpr (GROUP > 0) {
            const int group = step * Contents::GROUPS;
            if constexpr (IS_GATED) {
                tma_load_2d(shared.scale(pipe.index, 0), scale_map, first / 2, group, barrier);
                tma_load_2d(shared.scale(pipe.index, 1), scale_map, n / 2 + first / 2, group, barrier);
            } else {
                tma_load_2d(shared.scale(pipe.index, 0), scale_map, first, group, barrier);
            }
        }
        pipe.next();
        ++loaded;
        if (++step == work.steps) step = 0, ++tile;
    }
};

// The thread that loads the activations. `in_copy`: blocks of a copy. With one block a copy, columns count from the
// start of a row, so that columns beyond its end are zeros; else the map's third dimension counts blocks.
template <class W, int GROUP, class S>
__device__ __forceinline__ void load_activations(
    const SharedMemory<W, GROUP, S>& shared, const WorkTiles& work, const TensorMap& map, int blocks, int in_copy,
    bool by_column) {
    using Contents = Stage<W, GROUP, S>;
    const auto load = [&](unsigned target, int block, unsigned barrier) {
        tma_load_3d(target, map, by_column ? block * BLOCK : 0, by_column ? 0 : block, barrier);
    };
    if (shared.resident) {
        const int copies = (blocks + in_copy - 1) / in_copy, bytes = in_copy * shared.rows * ROW;
        mbarrier_arrive_expect_tx(shared.resident_full(), copies * bytes);
        for (int i = 0; i < copies; ++i) load(shared.x + i * bytes, i * in_copy, shared.resident_full());
        return;
    }
    PipelineState pipe(shared.stages);
    const int count = work.steps * work.count();
    for (int loaded = 0, step = 0; loaded < count; ++loaded, pipe.next()) {
        if (loaded >= shared.stages) mbarrier_wait(shared.empty(pipe.index), pipe.phase ^ 1);
        const unsigned barrier = shared.activations_full(pipe.index);
        mbarrier_arrive_expect_tx(barrier, Contents::BLOCKS * shared.rows * ROW);
        for (int b = 0; b < Contents::BLOCKS; b += in_copy)
            load(shared.activations(step, pipe.index, b), step * Contents::BLOCKS + b, barrier);
        if (++step == work.steps) step = 0;
    }
}

// Writes the norm of the fp32 row x, which is read past the L1 cache, as the resident activations, with zeros up to
// `blocks` blocks. Called by the first NORM_THREADS threads. The blocks have the order that SYNC takes, or the swizzle
// that wgmma takes.
template <bool CENTER, int VECTORS, bool SYNC>
__device__ __forceinline__ void normalise_input(
    const float* x, const float* norm_weight, const float* norm_bias, float eps, int k, int blocks, unsigned target) {
    __shared__ RowScratch<NORM_THREADS, VECTORS> scratch;
    const int pitch = round_up(k, 8);
    float v[VECTORS][8];
    uint4 raw[VECTORS][2] = {};
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int column = (i * NORM_THREADS + threadIdx.x) * 8;
        if (column >= pitch) continue;
        raw[i][0] = ld_global_cg_v4(x + column), raw[i][1] = ld_global_cg_v4(x + column + 4);
    }
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        load8(reinterpret_cast<const float*>(raw[i]), v[i]);
        zero_tail(v[i], (i * NORM_THREADS + threadIdx.x) * 8, k);
    }
    normalise_row<NORM_THREADS, CENTER, false>(v, norm_weight, norm_bias, eps, k, pitch, scratch);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int column = (i * NORM_THREADS + threadIdx.x) * 8, block = column / BLOCK, piece = column % BLOCK / 8;
        if (column >= blocks * BLOCK) continue;
        const uint4 packed = {
            pack_half2(v[i][0], v[i][1]), pack_half2(v[i][2], v[i][3]), pack_half2(v[i][4], v[i][5]),
            pack_half2(v[i][6], v[i][7])};
        st_shared_v4(target + block * ROW + (SYNC ? piece : piece ^ block % 8) * 16, column < k ? packed : uint4{});
    }
    fence_proxy_async();
    sync_threads<NORM_THREADS>();
}

// Blocks on an SM: one of this kernel and one of the next, which starts beside it.
constexpr int blocks_per_sm(int rows) { return rows <= 16 ? 2 : 1; }

constexpr int max_threads(bool sync, int input) {
    return (sync || input != HALF ? MMA_WARPS : WARPGROUP / WARP) * WARP + 2 * WARP;
}

// GROUP: columns of a scale, of type S; 0: each channel has one. SYNC: by mma.sync, not by wgmma. ROWS: at least those
// of x: 1 (SYNC), 8, 16, 32 or 64 (not SYNC). INPUT: HALF, or the norm of one row x of up to 8 * VECTORS * NORM_THREADS
// elements. F: the function of GATED and ACTIVATED. `channels`: rows of the weight in a tile, a multiple of 16, up to
// 64, with SYNC up to 128; tensor maps: see the launcher. `tiles` tiles and `steps` stages cover the weight. `stages`
// >= `window`: those in flight at the same time. in_copy, by_column: see load_activations. early: the x of a norm was
// complete before this kernel could start, so it waits for its predecessor only before it writes. Threads: a warp for
// 16 channels, of wgmma always four, of a norm always MMA_WARPS; and two warps that load. Dynamic shared memory:
// SharedMemory, and ROWS rows; fp16 weights with fewer than 64 channels: and the other channels' rows.
template <class W, int GROUP, class S, bool SYNC, int ROWS, int INPUT, int VECTORS, int EPILOGUE, int F>
__global__ void __launch_bounds__(max_threads(SYNC, INPUT), blocks_per_sm(ROWS)) skinny_float_gemm_hopper(
    const float* x, const float* norm_weight, const float* norm_bias, float eps, const float* w_scale,
    const float* bias, void* out, long long out_pitch, int rows, int n, int k, const __grid_constant__ TensorMap x_map,
    const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap scale_map, int channels, int tiles,
    int steps, int stages, int window, bool resident, int in_copy, bool by_column, bool early) {
    constexpr bool IS_GATED = EPILOGUE == GATED;
    extern __shared__ __align__(1024) char memory[];
    const int first_loader = blockDim.x - 2 * WARP, warps = SYNC ? channels / STEP : WARPGROUP / WARP;
    launch_dependent_grids();
    const int blocks = steps * Stage<W, GROUP, S>::BLOCKS;
    const SharedMemory<W, GROUP, S> shared(memory, rows, channels, warps, stages, resident, IS_GATED);
    const WorkTiles work = {tiles, steps};
    WeightProducer<W, GROUP, S, IS_GATED> weight = {
        shared, work, w_map, scale_map, n, window, PipelineState(stages), PipelineState(stages)};
    if (threadIdx.x == first_loader) {
        shared.init();
        for (int i = 0; i < window && weight.remaining(); ++i) weight.load();
    }
    __syncthreads();
    if (threadIdx.x >= first_loader) {
        if (threadIdx.x == first_loader) {
            while (weight.remaining()) weight.load();
        } else if (INPUT == HALF && threadIdx.x == first_loader + WARP) {
            prefetch_tensormap(x_map);
            wait_on_dependent_grids();
            load_activations(shared, work, x_map, blocks, in_copy, by_column);
        }
        return;
    }
    if (INPUT == HALF || !early) wait_on_dependent_grids();
    if constexpr (INPUT != HALF)
        normalise_input<INPUT == LAYER_NORM, VECTORS, SYNC>(x, norm_weight, norm_bias, eps, k, blocks, shared.x);
    if (threadIdx.x >= warps * WARP) return;
    if (INPUT == HALF && resident) mbarrier_wait(shared.resident_full(), 0);
    const int groups = GROUP ? (k + GROUP - 1) / (GROUP ? GROUP : 1) : 0;
    const Outputs outputs = {w_scale, bias, out, out_pitch, rows, IS_GATED ? n / 2 : n, groups, INPUT != HALF && early};
    if constexpr (SYNC)
        mma_warp<W, ROWS, GROUP, S, EPILOGUE, F>(shared, work, outputs);
    else
        wgmma_warps<W, ROWS / 8, GROUP, S, EPILOGUE, F>(shared, work, outputs);
}

}  // namespace bminf

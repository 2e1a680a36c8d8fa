// A few activation rows (1 to 32) times an int8 weight on compute capability 9.0: decoding of small batches, bound by
// reading the weights. The copy engine brings them and the asynchronous tensor cores take them from shared memory, so
// hardly any instructions stand between the two.
//
// Of a product of the tensor cores the left operand is a tile of 64 rows of the weight, the right one all activations.
// The two blocks of a cluster share the columns: each multiplies its half of them for every tile of the cluster, so
// that it needs that half of the activations only. It then finishes its part of the tile's outputs, from the int32 sums
// that both of them sent it: exact in any order.
//
// One thread copies the weight, and starts before the kernel waits for its input; another copies the activations; four
// warps multiply; four finish outputs.
#include "common/async.cuh"
#include "common/cluster.cuh"
#include "common/common.cuh"
#include "common/wgmma.cuh"
#include "constants/skinny_gemm_hopper.cuh"
#include "gemm/skinny_gemm.cuh"

namespace bminf {

constexpr int BOX = ROWS * DEPTH;
constexpr int STAGE = BOXES * BOX;
constexpr int WARPS = WARPGROUP / WARP;
constexpr int COPYING = 2 * WARPGROUP;  // the first thread of the two warps that copy
static_assert(THREADS == COPYING + 2 * WARP);
constexpr int PART_ROWS = ROWS / WARPS;  // of a tile, whose sums a warp has
constexpr int PARTS = WARPS / CLUSTER;   // that a block finishes

#define FOUR(i) "+r"(c[i][0]), "+r"(c[i][1]), "+r"(c[i][2]), "+r"(c[i][3])

// c = w @ x.T + (add ? c : 0), w [64, 32] and x [8 * TILES, 32].
__device__ __forceinline__ void wgmma(int (&c)[1][4], unsigned long long w, unsigned long long x, bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %6, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8 {%0,%1,%2,%3}, %4, %5, add;\n}"
        : FOUR(0)
        : "l"(w), "l"(x), "r"(static_cast<int>(add)));
}

__device__ __forceinline__ void wgmma(int (&c)[2][4], unsigned long long w, unsigned long long x, bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %10, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k32.s32.s8.s8 {%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, add;\n}"
        : FOUR(0), FOUR(1)
        : "l"(w), "l"(x), "r"(static_cast<int>(add)));
}

__device__ __forceinline__ void wgmma(int (&c)[4][4], unsigned long long w, unsigned long long x, bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k32.s32.s8.s8 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, add;\n}"
        : FOUR(0), FOUR(1), FOUR(2), FOUR(3)
        : "l"(w), "l"(x), "r"(static_cast<int>(add)));
}

// The tiles of a cluster, and of the columns, in steps of a stage, those of a block.
struct WorkTile {
    int first, tiles, column, steps;

    __device__ __forceinline__ WorkTile(int all_tiles, int all_steps) {
        const int cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER, rank = block_rank_in_cluster();
        first = static_cast<int>(static_cast<long long>(all_tiles) * cluster / clusters);
        tiles = static_cast<int>(static_cast<long long>(all_tiles) * (cluster + 1) / clusters) - first;
        const int before = all_steps * rank / CLUSTER;
        steps = all_steps * (rank + 1) / CLUSTER - before, column = before * BOXES * DEPTH;
    }
};

// Where a block has what in shared memory: the pipeline of stages, its part of the activations, the sums that both
// blocks send it for one tile and for the next, and barriers: for each stage those that say that its weight is there,
// that its activations are, and that it has been read; for each place of sums those that say that they are there, and
// that they have been read. The activations of all steps are `resident`, or those of a step come and go with its stage.
template <int TILES>
struct Shared {
    static constexpr int X_BOX = TILES * 8 * DEPTH, X_STAGE = BOXES * X_BOX;
    static constexpr int SENT = PARTS * TILES * WARP * 4 * sizeof(int);  // bytes that a block sends for a tile
    unsigned pipeline, x, sums, barriers;
    int stages;
    bool resident;

    __device__ __forceinline__ Shared(const char* shared, int stages, int steps, bool resident)
        : stages(stages),
          resident(resident) {
        pipeline = cast_smem_ptr_to_uint(shared), x = pipeline + stages * STAGE;
        sums = x + (resident ? steps : stages) * X_STAGE, barriers = sums + 2 * CLUSTER * SENT;
    }
    __device__ __forceinline__ unsigned has_weight(int stage) const { return barriers + 24 * stage; }
    __device__ __forceinline__ unsigned has_activations(int stage) const { return has_weight(stage) + 8; }
    __device__ __forceinline__ unsigned read(int stage) const { return has_weight(stage) + 16; }
    __device__ __forceinline__ unsigned has_sums(int place) const { return has_weight(stages) + 16 * place; }
    __device__ __forceinline__ unsigned sums_read(int place) const { return has_sums(place) + 8; }
    __device__ __forceinline__ unsigned weight(int stage) const { return pipeline + stage * STAGE; }
    __device__ __forceinline__ unsigned activations(int step, int stage) const {
        return x + (resident ? step : stage) * X_STAGE;
    }
    // Where this block gets the sums of block `rank`.
    __device__ __forceinline__ unsigned sums_of(int rank, int place) const {
        return sums + (place * CLUSTER + rank) * SENT;
    }
    __device__ __forceinline__ void expect_sums(int place) const {
        mbarrier_arrive_expect_tx(has_sums(place), CLUSTER * SENT);
    }
    __device__ __forceinline__ void init() const {
        for (int i = 0; i < stages; ++i) {
            mbarrier_init(has_weight(i), 1);
            mbarrier_init(has_activations(i), 1);
            mbarrier_init(read(i), WARPS);
        }
        for (int i = 0; i < 2; ++i) mbarrier_init(has_sums(i), 1), mbarrier_init(sums_read(i), CLUSTER);
        fence_mbarrier_init();
        for (int i = 0; i < 2; ++i) expect_sums(i);
    }
};

// A position in a circular buffer of stages: its index, and the phase (odd or even round) of its barriers.
struct PipelineState {
    int count, index = 0;
    unsigned phase = 0;

    __device__ __forceinline__ explicit PipelineState(int count) : count(count) {}
    __device__ __forceinline__ void next() {
        if (++index == count) index = 0, phase ^= 1;
    }
};

// The thread that copies the weight, stage by stage. Of a gated layer the first half of a tile are rows of the gate,
// the second half those of up.
template <int TILES, bool IS_GATED>
struct WeightProducer {
    static constexpr int MATRICES = IS_GATED ? 2 : 1;
    const Shared<TILES>& shared;
    const WorkTile& share;
    const TensorMap& map;
    int outputs;
    PipelineState pipe, landing;
    int tile = 0, step = 0, copied = 0;

    __device__ __forceinline__ bool left() const { return share.steps > 0 && tile < share.tiles; }
    __device__ __forceinline__ void copy() {
        if (copied >= WINDOW) mbarrier_wait(shared.has_weight(landing.index), landing.phase), landing.next();
        if (copied >= shared.stages) mbarrier_wait(shared.read(pipe.index), pipe.phase ^ 1);
        const unsigned barrier = shared.has_weight(pipe.index);
        mbarrier_arrive_expect_tx(barrier, STAGE);
#pragma unroll
        for (int b = 0; b < BOXES; ++b)
#pragma unroll
            for (int m = 0; m < MATRICES; ++m)
                tma_load_2d_evict_first(
                    shared.weight(pipe.index) + b * BOX + m * BOX / 2, map, share.column + (step * BOXES + b) * DEPTH,
                    m * outputs + (share.first + tile) * (ROWS / MATRICES), barrier);
        pipe.next();
        ++copied;
        if (++step == share.steps) step = 0, ++tile;
    }
};

// The thread that copies the activations.
template <int TILES>
__device__ __forceinline__ void load_activations(
    const Shared<TILES>& shared, const WorkTile& share, const TensorMap& map) {
    using Here = Shared<TILES>;
    PipelineState pipe(shared.stages);
    const int all = share.steps * (shared.resident ? 1 : share.tiles);
    for (int copied = 0, step = 0; copied < all; ++copied, pipe.next()) {
        if (copied >= shared.stages) mbarrier_wait(shared.read(pipe.index), pipe.phase ^ 1);
        const unsigned barrier = shared.has_activations(pipe.index), target = shared.activations(step, pipe.index);
        mbarrier_arrive_expect_tx(barrier, Here::X_STAGE);
#pragma unroll
        for (int b = 0; b < BOXES; ++b)
            tma_load_2d(target + b * Here::X_BOX, map, share.column + (step * BOXES + b) * DEPTH, 0, barrier);
        if (++step == share.steps) step = 0;
    }
}

// The four warps that multiply.
template <int TILES, bool IS_GATED>
__device__ __forceinline__ void mma_warps(const Shared<TILES>& shared, const WorkTile& share) {
    const int warp = threadIdx.x / WARP % WARPS, lane = threadIdx.x % WARP, rank = block_rank_in_cluster();
    // Who finishes this warp's rows of a tile, and which of its parts they are: of gate and up, the same rows.
    const int target = IS_GATED ? warp % CLUSTER : warp / PARTS, part = IS_GATED ? warp / CLUSTER : warp % PARTS;
    PipelineState pipe(shared.stages), sums_stage(2);
    for (int tile = 0; tile < share.tiles; ++tile, sums_stage.next()) {
        int c[TILES][4] = {}, before = 0;
        for (int step = 0; step < share.steps; ++step, pipe.next()) {
            mbarrier_wait(shared.has_weight(pipe.index), pipe.phase);
            if (tile == 0 || !shared.resident) mbarrier_wait(shared.has_activations(pipe.index), pipe.phase);
            const unsigned long long w = make_smem_desc(shared.weight(pipe.index), 0);
            const unsigned long long x = make_smem_desc(shared.activations(step, pipe.index), 0);
            wgmma_fence();
#pragma unroll
            for (int b = 0; b < BOXES; ++b)
#pragma unroll
                for (int i = 0; i < DEPTH / 32; ++i)
                    wgmma(c, w + (b * BOX + i * 32) / 16, x + (b * shared.X_BOX + i * 32) / 16, step + b + i > 0);
            wgmma_commit_group();
            wgmma_wait_group<1>();
            if (step > 0 && lane == 0) mbarrier_arrive(shared.read(before));
            before = pipe.index;
        }
        wgmma_wait_group<0>();
        warpgroup_fence_operand(c);
        if (share.steps > 0 && lane == 0) mbarrier_arrive(shared.read(before));
        if (tile >= 2) mbarrier_wait(shared.sums_read(sums_stage.index), sums_stage.phase ^ 1);
        const unsigned there = map_shared_rank(shared.sums_of(rank, sums_stage.index), target);
        const unsigned barrier = map_shared_rank(shared.has_sums(sums_stage.index), target);
#pragma unroll
        for (int t = 0; t < TILES; ++t) st_async(there + ((part * TILES + t) * WARP + lane) * 16, c[t], barrier);
    }
}

struct Outputs {
    const float *x_scale, *w_scale, *bias;
    void* out;
    long long pitch;
    int rows, count;  // outputs of a row
};

// The four warps that finish outputs. A thread has the tokens (rows of the activations) 8 t + thread / 16, and of each
// part the same channel, or of a gated layer's two parts, gate and up, one.
template <int TILES, int EPILOGUE, int F>
__device__ __forceinline__ void epilogue_warps(const Shared<TILES>& shared, const WorkTile& share, const Outputs& to) {
    constexpr int MATRICES = EPILOGUE == GATED ? 2 : 1, COUNT = PARTS / MATRICES;
    const int local = threadIdx.x % PART_ROWS, token = threadIdx.x / PART_ROWS, rank = block_rank_in_cluster();
    const int place_in_part = (local % 8 * 4 + token / 2) * 4 + local / 8 * 2 + token % 2;  // as products leave them
    Channel channels[COUNT][MATRICES];
    const auto channel_of = [&](int tile, int i) {
        return (((share.first + tile) * CLUSTER + rank) * COUNT + i) * PART_ROWS + local;
    };
    const auto load_channels = [&](int tile) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
#pragma unroll
            for (int m = 0; m < MATRICES; ++m) {
                const int at = m * to.count + channel_of(tile, i);
                const bool inside = EPILOGUE != TO_INT32 && channel_of(tile, i) < to.count;
                channels[i][m] = {
                    inside ? __ldg(to.w_scale + at) : 0.0f, inside && to.bias ? __ldg(to.bias + at) : 0.0f};
            }
    };
    load_channels(0);
    wait_on_dependent_grids();
    float x_scale[TILES];
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
        const int row = t * 8 + token;
        x_scale[t] = EPILOGUE != TO_INT32 && row < to.rows ? __ldcg(to.x_scale + row) : 0.0f;
    }
    PipelineState sums_stage(2);
    for (int tile = 0; tile < share.tiles; ++tile, sums_stage.next()) {
        float residual[COUNT][TILES];
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
                const int row = t * 8 + token, channel = channel_of(tile, i);
                const float* before = static_cast<const float*>(to.out) + row * to.pitch + channel;
                residual[i][t] = EPILOGUE == ADD && channel < to.count && row < to.rows ? __ldcg(before) : 0.0f;
            }
        mbarrier_wait(shared.has_sums(sums_stage.index), sums_stage.phase);
        int sums[COUNT][TILES][MATRICES] = {};
#pragma unroll
        for (int from = 0; from < CLUSTER; ++from)
#pragma unroll
            for (int p = 0; p < PARTS; ++p)
#pragma unroll
                for (int t = 0; t < TILES; ++t)
                    sums[p / MATRICES][t][p % MATRICES] += ld_shared(
                        shared.sums_of(from, sums_stage.index) +
                        ((p * TILES + t) * WARP * 4 + place_in_part) * sizeof(int));
        if (tile + 2 < share.tiles) {  // nobody waits for the last ones, and who does not may have gone
            sync_threads<WARPGROUP>();
            if (threadIdx.x == 0) shared.expect_sums(sums_stage.index);
            if (threadIdx.x < CLUSTER) mbarrier_arrive_remote(shared.sums_read(sums_stage.index), threadIdx.x);
        }
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
                const int row = t * 8 + token, channel = channel_of(tile, i);
                if (row < to.rows && channel < to.count)
                    put<EPILOGUE, F>(
                        to.out, row * to.pitch + channel, sums[i][t], x_scale[t], channels[i], to.bias != nullptr,
                        residual[i][t]);
            }
        if (tile + 1 < share.tiles) load_channels(tile + 1);
    }
}

// x_map: the activations int8 [rows, k], rows up to 8 TILES, in boxes of 8 TILES rows; w_map: the weight int8 [n, k] in
// boxes of 64, or 32 if GATED. x_scale: fp32 [rows]; w_scale, bias: fp32 [n]. out: [rows, n] with rows of out_pitch
// elements: fp16, fp32, fp32 to add to, or int32; or fp16 [rows, n / 2] if GATED. F is the gate's function. `tiles` of
// 64 rows of the weight and `steps` of BOXES * 128 columns cover it. Blocks come in clusters of CLUSTER. `stages`, at
// least WINDOW, and `resident`: see Shared, which is the dynamic shared memory.
template <int TILES, int EPILOGUE, int F>
__global__ void __launch_bounds__(THREADS, 1) skinny_gemm_hopper(
    const float* x_scale, const float* w_scale, const float* bias, void* out, long long out_pitch, int rows, int n,
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, int tiles, int steps, int stages,
    bool resident) {
    constexpr bool IS_GATED = EPILOGUE == GATED;
    extern __shared__ __align__(1024) char memory[];
    launch_dependent_grids();
    const Shared<TILES> shared(memory, stages, (steps + CLUSTER - 1) / CLUSTER, resident);
    const WorkTile share(tiles, steps);
    const int outputs = IS_GATED ? n / 2 : n;
    WeightProducer<TILES, IS_GATED> weight = {
        shared, share, w_map, outputs, PipelineState(stages), PipelineState(stages)};
    if (threadIdx.x == COPYING) {
        shared.init();
        for (int i = 0; i < WINDOW && weight.left(); ++i) weight.copy();
    }
    __syncwarp();
    cluster_arrive_relaxed<CLUSTER>();
    cluster_wait<CLUSTER>();
    if (threadIdx.x == COPYING) {
        while (weight.left()) weight.copy();
    } else if (threadIdx.x == COPYING + WARP) {
        prefetch_tensormap(x_map);
        wait_on_dependent_grids();
        load_activations(shared, share, x_map);
    } else if (threadIdx.x < WARPGROUP) {
        epilogue_warps<TILES, EPILOGUE, F>(shared, share, {x_scale, w_scale, bias, out, out_pitch, rows, outputs});
    } else if (threadIdx.x < COPYING) {
        mma_warps<TILES, IS_GATED>(shared, share);
    }
}

}  // namespace bminf

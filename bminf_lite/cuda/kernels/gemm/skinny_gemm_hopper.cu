// A few activation rows (1 to 32) times an int8 weight on compute capability 9.0: decoding of small batches, bound by reading
// the weights. The copy engine brings them and the asynchronous tensor cores take them from shared memory, so hardly any
// instructions stand between the two.
//
// Of a product of the tensor cores the left operand is a tile of 64 rows of the weight, the right one all activations. The
// two blocks of a cluster share the columns: each multiplies its half of them for every tile of the cluster, so that it needs
// that half of the activations only. It then finishes its part of the tile's outputs, from the int32 sums that both of them
// sent it: exact in any order.
//
// One thread copies the weight, and starts before the kernel waits for its input; another copies the activations; four warps
// multiply; four finish outputs.
#include "common/async.cuh"
#include "common/cluster.cuh"
#include "common/common.cuh"
#include "gemm/skinny_gemm.cuh"
#include "common/wgmma.cuh"

namespace bminf {

constexpr int CLUSTER = 2;
constexpr int ROWS = 64;    // of the weight in a tile
constexpr int DEPTH = 128;  // columns of a box
constexpr int BOX = ROWS * DEPTH;
constexpr int BOXES = 2;    // in a stage
constexpr int STAGE = BOXES * BOX;
constexpr int WINDOW = 4;   // stages on their way: more only make others wait longer for what they read
constexpr int WARPS = GROUP / WARP;
constexpr int COPYING = 2 * GROUP;  // the first thread of the two warps that copy
constexpr int THREADS = COPYING + 2 * WARP;
constexpr int PART_ROWS = ROWS / WARPS;  // of a tile, whose sums a warp has
constexpr int PARTS = WARPS / CLUSTER;   // that a block finishes

#define FOUR(i) "+r"(c[i][0]), "+r"(c[i][1]), "+r"(c[i][2]), "+r"(c[i][3])

// c = w @ x.T + (add ? c : 0), w [64, 32] and x [8 * TILES, 32].
__device__ __forceinline__ void multiply(int (&c)[1][4], unsigned long long w, unsigned long long x, bool add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %6, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8 {%0,%1,%2,%3}, %4, %5, add;\n}"
                 : FOUR(0) : "l"(w), "l"(x), "r"(static_cast<int>(add)));
}

__device__ __forceinline__ void multiply(int (&c)[2][4], unsigned long long w, unsigned long long x, bool add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %10, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n16k32.s32.s8.s8 {%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, add;\n}"
                 : FOUR(0), FOUR(1) : "l"(w), "l"(x), "r"(static_cast<int>(add)));
}

__device__ __forceinline__ void multiply(int (&c)[4][4], unsigned long long w, unsigned long long x, bool add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %18, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k32.s32.s8.s8 "
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, add;\n}"
                 : FOUR(0), FOUR(1), FOUR(2), FOUR(3) : "l"(w), "l"(x), "r"(static_cast<int>(add)));
}

// The tiles of a cluster, and of the columns, in steps of a stage, those of a block.
struct Share {
    int first, tiles, column, steps;

    __device__ __forceinline__ Share(int all_tiles, int all_steps) {
        const int cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER, rank = rank_in_cluster();
        first = static_cast<int>(static_cast<long long>(all_tiles) * cluster / clusters);
        tiles = static_cast<int>(static_cast<long long>(all_tiles) * (cluster + 1) / clusters) - first;
        const int before = all_steps * rank / CLUSTER;
        steps = all_steps * (rank + 1) / CLUSTER - before, column = before * BOXES * DEPTH;
    }
};

// Where a block has what in shared memory: the ring of stages, its part of the activations, the sums that both blocks send
// it for one tile and for the next, and barriers: for each stage those that say that its weight is there, that its
// activations are, and that it has been read; for each place of sums those that say that they are there, and that they have
// been read. The activations of all steps are `resident`, or those of a step come and go with its stage.
template <int TILES>
struct Shared {
    static constexpr int X_BOX = TILES * 8 * DEPTH, X_STAGE = BOXES * X_BOX;
    static constexpr int SENT = PARTS * TILES * WARP * 4 * sizeof(int);  // bytes that a block sends for a tile
    unsigned ring, x, sums, barriers;
    int stages;
    bool resident;

    __device__ __forceinline__ Shared(const char* shared, int stages, int steps, bool resident)
        : stages(stages), resident(resident)
    {
        ring = shared_address(shared), x = ring + stages * STAGE;
        sums = x + (resident ? steps : stages) * X_STAGE, barriers = sums + 2 * CLUSTER * SENT;
    }
    __device__ __forceinline__ unsigned has_weight(int stage) const { return barriers + 24 * stage; }
    __device__ __forceinline__ unsigned has_activations(int stage) const { return has_weight(stage) + 8; }
    __device__ __forceinline__ unsigned read(int stage) const { return has_weight(stage) + 16; }
    __device__ __forceinline__ unsigned has_sums(int place) const { return has_weight(stages) + 16 * place; }
    __device__ __forceinline__ unsigned sums_read(int place) const { return has_sums(place) + 8; }
    __device__ __forceinline__ unsigned weight(int stage) const { return ring + stage * STAGE; }
    __device__ __forceinline__ unsigned activations(int step, int stage) const {
        return x + (resident ? step : stage) * X_STAGE;
    }
    // Where this block gets the sums of block `rank`.
    __device__ __forceinline__ unsigned sums_of(int rank, int place) const { return sums + (place * CLUSTER + rank) * SENT; }
    __device__ __forceinline__ void expect_sums(int place) const { barrier_expect(has_sums(place), CLUSTER * SENT); }
    __device__ __forceinline__ void init() const {
        for (int i = 0; i < stages; ++i) {
            barrier_init(has_weight(i), 1);
            barrier_init(has_activations(i), 1);
            barrier_init(read(i), WARPS);
        }
        for (int i = 0; i < 2; ++i) barrier_init(has_sums(i), 1), barrier_init(sums_read(i), CLUSTER);
        barriers_ready();
        for (int i = 0; i < 2; ++i) expect_sums(i);
    }
};

// A walk round a ring: a place, and how often it was passed, odd or even.
struct Walk {
    int count, place = 0;
    unsigned round = 0;

    __device__ __forceinline__ explicit Walk(int count) : count(count) {}
    __device__ __forceinline__ void next() {
        if (++place == count) place = 0, round ^= 1;
    }
};

// The thread that copies the weight, stage by stage. Of a gated layer the first half of a tile are rows of the gate, the
// second half those of up.
template <int TILES, bool IS_GATED>
struct Weight {
    static constexpr int MATRICES = IS_GATED ? 2 : 1;
    const Shared<TILES>& shared;
    const Share& share;
    const TensorMap& map;
    int outputs;
    Walk stage, landing;
    int tile = 0, step = 0, copied = 0;

    __device__ __forceinline__ bool left() const { return share.steps > 0 && tile < share.tiles; }
    __device__ __forceinline__ void copy() {
        if (copied >= WINDOW) barrier_wait(shared.has_weight(landing.place), landing.round), landing.next();
        if (copied >= shared.stages) barrier_wait(shared.read(stage.place), stage.round ^ 1);
        const unsigned barrier = shared.has_weight(stage.place);
        barrier_expect(barrier, STAGE);
#pragma unroll
        for (int b = 0; b < BOXES; ++b)
#pragma unroll
            for (int m = 0; m < MATRICES; ++m)
                copy_box_once(shared.weight(stage.place) + b * BOX + m * BOX / 2, map,
                              share.column + (step * BOXES + b) * DEPTH,
                              m * outputs + (share.first + tile) * (ROWS / MATRICES), barrier);
        stage.next();
        ++copied;
        if (++step == share.steps) step = 0, ++tile;
    }
};

// The thread that copies the activations.
template <int TILES>
__device__ __forceinline__ void copy_activations(const Shared<TILES>& shared, const Share& share, const TensorMap& map) {
    using Here = Shared<TILES>;
    Walk stage(shared.stages);
    const int all = share.steps * (shared.resident ? 1 : share.tiles);
    for (int copied = 0, step = 0; copied < all; ++copied, stage.next()) {
        if (copied >= shared.stages) barrier_wait(shared.read(stage.place), stage.round ^ 1);
        const unsigned barrier = shared.has_activations(stage.place), target = shared.activations(step, stage.place);
        barrier_expect(barrier, Here::X_STAGE);
#pragma unroll
        for (int b = 0; b < BOXES; ++b)
            copy_box(target + b * Here::X_BOX, map, share.column + (step * BOXES + b) * DEPTH, 0, barrier);
        if (++step == share.steps) step = 0;
    }
}

// The four warps that multiply.
template <int TILES, bool IS_GATED>
__device__ __forceinline__ void multiply_all(const Shared<TILES>& shared, const Share& share) {
    const int warp = threadIdx.x / WARP % WARPS, lane = threadIdx.x % WARP, rank = rank_in_cluster();
    // Who finishes this warp's rows of a tile, and which of its parts they are: of gate and up, the same rows.
    const int target = IS_GATED ? warp % CLUSTER : warp / PARTS, part = IS_GATED ? warp / CLUSTER : warp % PARTS;
    Walk stage(shared.stages), place(2);
    for (int tile = 0; tile < share.tiles; ++tile, place.next()) {
        int c[TILES][4] = {}, before = 0;
        for (int step = 0; step < share.steps; ++step, stage.next()) {
            barrier_wait(shared.has_weight(stage.place), stage.round);
            if (tile == 0 || !shared.resident) barrier_wait(shared.has_activations(stage.place), stage.round);
            const unsigned long long w = operand(shared.weight(stage.place), 0);
            const unsigned long long x = operand(shared.activations(step, stage.place), 0);
            products_begin();
#pragma unroll
            for (int b = 0; b < BOXES; ++b)
#pragma unroll
                for (int i = 0; i < DEPTH / 32; ++i)
                    multiply(c, w + (b * BOX + i * 32) / 16, x + (b * shared.X_BOX + i * 32) / 16, step + b + i > 0);
            products_end();
            products_wait<1>();
            if (step > 0 && lane == 0) barrier_arrive(shared.read(before));
            before = stage.place;
        }
        products_wait<0>();
        pin(c);
        if (share.steps > 0 && lane == 0) barrier_arrive(shared.read(before));
        if (tile >= 2) barrier_wait(shared.sums_read(place.place), place.round ^ 1);
        const unsigned there = address_in(shared.sums_of(rank, place.place), target);
        const unsigned barrier = address_in(shared.has_sums(place.place), target);
#pragma unroll
        for (int t = 0; t < TILES; ++t) send(there + ((part * TILES + t) * WARP + lane) * 16, c[t], barrier);
    }
}

struct Outputs {
    const float *x_scale, *w_scale, *bias;
    void* out;
    long long pitch;
    int rows, count;  // outputs of a row
};

// The four warps that finish outputs. A thread has the tokens (rows of the activations) 8 t + thread / 16, and of each part
// the same channel, or of a gated layer's two parts, gate and up, one.
template <int TILES, int OUTPUT, int F>
__device__ __forceinline__ void finish_all(const Shared<TILES>& shared, const Share& share, const Outputs& to) {
    constexpr int MATRICES = OUTPUT == GATED ? 2 : 1, COUNT = PARTS / MATRICES;
    const int local = threadIdx.x % PART_ROWS, token = threadIdx.x / PART_ROWS, rank = rank_in_cluster();
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
                const bool inside = OUTPUT != SUMS && channel_of(tile, i) < to.count;
                channels[i][m] = {inside ? __ldg(to.w_scale + at) : 0.0f, inside && to.bias ? __ldg(to.bias + at) : 0.0f};
            }
    };
    load_channels(0);
    wait_for_predecessor();
    float x_scale[TILES];
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
        const int row = t * 8 + token;
        x_scale[t] = OUTPUT != SUMS && row < to.rows ? __ldcg(to.x_scale + row) : 0.0f;
    }
    Walk place(2);
    for (int tile = 0; tile < share.tiles; ++tile, place.next()) {
        float residual[COUNT][TILES];
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
                const int row = t * 8 + token, channel = channel_of(tile, i);
                const float* before = static_cast<const float*>(to.out) + row * to.pitch + channel;
                residual[i][t] = OUTPUT == ADD && channel < to.count && row < to.rows ? __ldcg(before) : 0.0f;
            }
        barrier_wait(shared.has_sums(place.place), place.round);
        int sums[COUNT][TILES][MATRICES] = {};
#pragma unroll
        for (int from = 0; from < CLUSTER; ++from)
#pragma unroll
            for (int p = 0; p < PARTS; ++p)
#pragma unroll
                for (int t = 0; t < TILES; ++t)
                    sums[p / MATRICES][t][p % MATRICES] += load_shared(
                        shared.sums_of(from, place.place) + ((p * TILES + t) * WARP * 4 + place_in_part) * sizeof(int));
        if (tile + 2 < share.tiles) {  // nobody waits for the last ones, and who does not may have gone
            sync_threads<GROUP>();
            if (threadIdx.x == 0) shared.expect_sums(place.place);
            if (threadIdx.x < CLUSTER) barrier_arrive_at(shared.sums_read(place.place), threadIdx.x);
        }
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
                const int row = t * 8 + token, channel = channel_of(tile, i);
                if (row < to.rows && channel < to.count)
                    put<OUTPUT, F>(to.out, row * to.pitch + channel, sums[i][t], x_scale[t], channels[i],
                                   to.bias != nullptr, residual[i][t]);
            }
        if (tile + 1 < share.tiles) load_channels(tile + 1);
    }
}

// x_map: the activations int8 [rows, k], rows up to 8 TILES, in boxes of 8 TILES rows; w_map: the weight int8 [n, k] in boxes
// of 64, or 32 if GATED. x_scale: fp32 [rows]; w_scale, bias: fp32 [n]. out: [rows, n] with rows of out_pitch elements: fp16,
// fp32, fp32 to add to, or int32; or fp16 [rows, n / 2] if GATED. F is the gate's function. `tiles` of 64 rows of the weight
// and `steps` of BOXES * 128 columns cover it. Blocks come in clusters of CLUSTER. `stages`, at least WINDOW, and `resident`:
// see Shared, which is the dynamic shared memory.
template <int TILES, int OUTPUT, int F>
__global__ void __launch_bounds__(THREADS, 1) few_rows_hopper(
    const float* x_scale, const float* w_scale, const float* bias, void* out, long long out_pitch, int rows, int n,
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, int tiles, int steps, int stages,
    bool resident)
{
    constexpr bool IS_GATED = OUTPUT == GATED;
    extern __shared__ __align__(1024) char memory[];
    let_successor_start();
    const Shared<TILES> shared(memory, stages, (steps + CLUSTER - 1) / CLUSTER, resident);
    const Share share(tiles, steps);
    const int outputs = IS_GATED ? n / 2 : n;
    Weight<TILES, IS_GATED> weight = {shared, share, w_map, outputs, Walk(stages), Walk(stages)};
    if (threadIdx.x == COPYING) {
        shared.init();
        for (int i = 0; i < WINDOW && weight.left(); ++i) weight.copy();
    }
    __syncwarp();
    tell_cluster<CLUSTER>();
    wait_for_cluster<CLUSTER>();
    if (threadIdx.x == COPYING) {
        while (weight.left()) weight.copy();
    } else if (threadIdx.x == COPYING + WARP) {
        prefetch_map(x_map);
        wait_for_predecessor();
        copy_activations(shared, share, x_map);
    } else if (threadIdx.x < GROUP) {
        finish_all<TILES, OUTPUT, F>(shared, share, {x_scale, w_scale, bias, out, out_pitch, rows, outputs});
    } else if (threadIdx.x < COPYING) {
        multiply_all<TILES, IS_GATED>(shared, share);
    }
}

}  // namespace bminf

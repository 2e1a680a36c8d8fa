// int8 GEMM for a few rows (1 to 64) by TMA and wgmma, on compute capability 9.0: decoding of small batches, which is
// memory-bound, because the weight is read once.
//
//     out = epilogue(x @ w.T), see skinny_gemm.cuh
//
// x: int8 [rows, k]; w: int8 [n, k]; x_scale: fp32 [rows]; w_scale, bias: fp32 [n]; out: [rows, n], or [rows, n / 2] of
// a gated layer.
//
// The left operand of wgmma is a tile of 64 channels of the weight, the right operand all rows of x. Each cluster of
// two blocks has its own tiles, which its blocks process together: each block multiplies one half of the columns, so it
// loads only that half of x, and sends the sums to the block that finishes them. Each block finishes one half of the
// channels of every tile.
//
// The kernel is warp-specialised. One thread loads the weight by TMA, and starts before the kernel waits for its input;
// another loads x; a warpgroup multiplies; a warpgroup applies the epilogue, while the next tile is multiplied.
#include "common/adapters.cuh"
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
constexpr int FIRST_LOADER = 2 * WARPGROUP;  // the first thread of the two warps that load
static_assert(THREADS == FIRST_LOADER + 2 * WARP);
constexpr int PART_ROWS = ROWS / WARPS;  // channels of a part: what a warp has of a tile
constexpr int PARTS = WARPS / CLUSTER;   // that a block finishes of each tile

// The work of one block: `tiles` tiles from `first` on, which are those of its cluster; and of the columns `steps`
// stages from `column` on, which are its own.
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

// The shared memory of a block:
//   pipeline     `stages` stages of the weight
//   x            the activations: all steps if `resident`, else a stage for each stage of the weight
//   sums         the sums that both blocks send to this one, for two tiles (double buffering)
//   barriers     for each stage: the weight has arrived, the activations have arrived, both have been read;
//                for each buffer of sums: the sums have arrived, they have been read
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
    __device__ __forceinline__ unsigned weight_full(int stage) const { return barriers + 24 * stage; }
    __device__ __forceinline__ unsigned activations_full(int stage) const { return weight_full(stage) + 8; }
    __device__ __forceinline__ unsigned empty(int stage) const { return weight_full(stage) + 16; }
    __device__ __forceinline__ unsigned sums_full(int buffer) const { return weight_full(stages) + 16 * buffer; }
    __device__ __forceinline__ unsigned sums_empty(int buffer) const { return sums_full(buffer) + 8; }
    __device__ __forceinline__ unsigned weight(int stage) const { return pipeline + stage * STAGE; }
    __device__ __forceinline__ unsigned activations(int step, int stage) const {
        return x + (resident ? step : stage) * X_STAGE;
    }
    // The sums that block `rank` sends to this one.
    __device__ __forceinline__ unsigned sums_of(int rank, int buffer) const {
        return sums + (buffer * CLUSTER + rank) * SENT;
    }
    __device__ __forceinline__ void expect_sums(int buffer) const {
        mbarrier_arrive_expect_tx(sums_full(buffer), CLUSTER * SENT);
    }
    __device__ __forceinline__ void init() const {
        for (int i = 0; i < stages; ++i) {
            mbarrier_init(weight_full(i), 1);
            mbarrier_init(activations_full(i), 1);
            mbarrier_init(empty(i), WARPS);
        }
        for (int i = 0; i < 2; ++i) mbarrier_init(sums_full(i), 1), mbarrier_init(sums_empty(i), CLUSTER);
        fence_mbarrier_init();
        for (int i = 0; i < 2; ++i) expect_sums(i);
    }
};

// The thread that loads the weight. Of a gated layer the first half of a tile are channels of the gate, the second half
// those of up. `pipe` is the stage to be loaded next, `landing` the oldest one in flight.
template <int TILES, bool IS_GATED>
struct WeightProducer {
    static constexpr int MATRICES = IS_GATED ? 2 : 1;
    const Shared<TILES>& shared;
    const WorkTile& work;
    const TensorMap& map;
    int outputs;
    PipelineState pipe, landing;
    int tile = 0, step = 0, loaded = 0;

    __device__ __forceinline__ bool remaining() const { return work.steps > 0 && tile < work.tiles; }
    __device__ __forceinline__ void load() {
        if (loaded >= WINDOW) mbarrier_wait(shared.weight_full(landing.index), landing.phase), landing.next();
        if (loaded >= shared.stages) mbarrier_wait(shared.empty(pipe.index), pipe.phase ^ 1);
        const unsigned barrier = shared.weight_full(pipe.index);
        mbarrier_arrive_expect_tx(barrier, STAGE);
#pragma unroll
        for (int b = 0; b < BOXES; ++b)
#pragma unroll
            for (int m = 0; m < MATRICES; ++m)
                tma_load_2d_evict_first(
                    shared.weight(pipe.index) + b * BOX + m * BOX / 2, map, work.column + (step * BOXES + b) * DEPTH,
                    m * outputs + (work.first + tile) * (ROWS / MATRICES), barrier);
        pipe.next();
        ++loaded;
        if (++step == work.steps) step = 0, ++tile;
    }
};

// Orders what this thread has acquired before its copies by TMA.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// The thread that loads the activations.
template <int TILES>
__device__ __forceinline__ void load_activations(
    const Shared<TILES>& shared, const WorkTile& work, const TensorMap& map) {
    using Memory = Shared<TILES>;
    PipelineState pipe(shared.stages);
    const int count = work.steps * (shared.resident ? 1 : work.tiles);
    for (int loaded = 0, step = 0; loaded < count; ++loaded, pipe.next()) {
        if (loaded >= shared.stages) mbarrier_wait(shared.empty(pipe.index), pipe.phase ^ 1);
        const unsigned barrier = shared.activations_full(pipe.index), target = shared.activations(step, pipe.index);
        mbarrier_arrive_expect_tx(barrier, Memory::X_STAGE);
#pragma unroll
        for (int b = 0; b < BOXES; ++b)
            tma_load_2d(target + b * Memory::X_BOX, map, work.column + (step * BOXES + b) * DEPTH, 0, barrier);
        if (++step == work.steps) step = 0;
    }
}

// The warpgroup that multiplies. Warp w has part w of each tile: 16 channels of all rows of x.
template <int TILES, bool IS_GATED>
__device__ __forceinline__ void mma_warps(const Shared<TILES>& shared, const WorkTile& work) {
    const int warp = threadIdx.x / WARP % WARPS, lane = threadIdx.x % WARP, rank = block_rank_in_cluster();
    // The block that finishes this warp's part of a tile, and the number of the part there. Of a gated layer, the parts
    // of the gate and of up with the same outputs go to the same block.
    const int target = IS_GATED ? warp % CLUSTER : warp / PARTS, part = IS_GATED ? warp / CLUSTER : warp % PARTS;
    // 64 rows leave room for few stages, so a stage is released at once, not when the next one has arrived.
    constexpr bool RELEASE_AT_ONCE = TILES == 8;
    PipelineState pipe(shared.stages), buffer(2);
    for (int tile = 0; tile < work.tiles; ++tile, buffer.next()) {
        int c[TILES][4] = {}, previous = 0;
        for (int step = 0; step < work.steps; ++step, pipe.next()) {
            mbarrier_wait(shared.weight_full(pipe.index), pipe.phase);
            if (tile == 0 || !shared.resident) mbarrier_wait(shared.activations_full(pipe.index), pipe.phase);
            const unsigned long long w = make_smem_desc(shared.weight(pipe.index), 0);
            const unsigned long long x = make_smem_desc(shared.activations(step, pipe.index), 0);
            wgmma_fence();
#pragma unroll
            for (int b = 0; b < BOXES; ++b)
#pragma unroll
                for (int i = 0; i < DEPTH / 32; ++i)
                    wgmma(c, w + (b * BOX + i * 32) / 16, x + (b * shared.X_BOX + i * 32) / 16, step + b + i > 0);
            wgmma_commit_group();
            wgmma_wait_group<RELEASE_AT_ONCE ? 0 : 1>();
            const int finished = RELEASE_AT_ONCE ? pipe.index : previous;
            if ((RELEASE_AT_ONCE || step > 0) && lane == 0) mbarrier_arrive(shared.empty(finished));
            previous = pipe.index;
        }
        wgmma_wait_group<0>();
        warpgroup_fence_operand(c);
        if (!RELEASE_AT_ONCE && work.steps > 0 && lane == 0) mbarrier_arrive(shared.empty(previous));
        if (tile >= 2) mbarrier_wait(shared.sums_empty(buffer.index), buffer.phase ^ 1);
        const unsigned remote = map_shared_rank(shared.sums_of(rank, buffer.index), target);
        const unsigned barrier = map_shared_rank(shared.sums_full(buffer.index), target);
#pragma unroll
        for (int t = 0; t < TILES; ++t) st_async(remote + ((part * TILES + t) * WARP + lane) * 16, c[t], barrier);
    }
}

// The operands of the epilogue, and `count` outputs for each of `rows` rows.
struct Outputs {
    const float *x_scale, *w_scale, *bias;
    void* out;
    long long pitch;
    int rows, count;
};

// The sums of no side product.
template <int TILES, int COUNT, int MATRICES>
struct NoSums {
    __device__ __forceinline__ NoSums(const NoSide&, int) {}
    struct Ahead {};
    template <class F>
    __device__ __forceinline__ void prefetch(int, const F&) const {}
    template <class F>
    __device__ __forceinline__ void begin(Ahead&, const F&) const {}
};

// The side product of what this thread has of a tile, by tensor cores, whose left operand are 16 channels of `up`. The
// right one are the rows of x that this warp has: columns 2 i and 2 i + 1 are its two rows of tile i of x, of up to 4
// tiles; with 8 tiles there are two right operands.
template <int TILES, int COUNT, int MATRICES>
struct SideSums {
    static constexpr int RIGHT = (TILES + 3) / 4;
    const SideProduct& side;
    int rows, own_slot, own_rank;  // of a row of this warp for each lane
    int slots[RIGHT][2];           // of the rows whose sums this lane has

    // Row `index` of this warp, 2 TILES in all.
    __device__ __forceinline__ static int row_of(int index) {
        return index / 2 * 8 + threadIdx.x / WARP * 2 + index % 2;
    }
    __device__ __forceinline__ SideSums(const SideProduct& side, int rows) : side(side), rows(rows) {
        const int lane = threadIdx.x % WARP, row = row_of(lane);
        own_slot = lane < 2 * TILES && row < rows ? side.slots[row] : 0;
        own_rank = side.rank(own_slot);
#pragma unroll
        for (int h = 0; h < RIGHT; ++h)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int from = h * 8 + lane % 4 * 2 + i;
                slots[h][i] = __shfl_sync(FULL, own_slot, from);
                if (from >= 2 * TILES) slots[h][i] = 0;
            }
    }
    // Fetches what this warp reads of `up` for its tiles into the L2 cache. channels(tile, m): the first of COUNT *
    // PART_ROWS channels.
    template <class F>
    __device__ __forceinline__ void prefetch(int tiles, const F& channels) const {
        const bool leads = __ffs(__match_any_sync(FULL, own_slot)) - 1 == threadIdx.x % WARP;
        if (!leads || own_rank == 0) return;
        const __half* up = side.up(own_slot, own_rank);
#pragma unroll 1
        for (int tile = 0; tile < tiles; ++tile)
#pragma unroll
            for (int m = 0; m < MATRICES; ++m) {
                const int first = channels(tile, m), count = min(COUNT * PART_ROWS, side.outputs - first);
                if (count > 0) prefetch_bulk_l2(up + static_cast<size_t>(first) * own_rank, count * own_rank * 2);
            }
    }
    // What a step of RANKS ranks multiplies: of `up`, and of the rows' inputs.
    struct UpRanks {
        uint2 low[COUNT][MATRICES], high[COUNT][MATRICES];
    };
    struct Inputs {
        uint2 of[MATRICES][RIGHT];
    };
    // What is loaded ahead: of `up` the first step of the next tile, and the first ranks of inputs for the sections of
    // the tile before. With more rows registers do not suffice for it.
    static constexpr bool IS_AHEAD = TILES <= 4;
    struct Ahead {
        UpRanks up;
        Inputs inputs;
        int sections[MATRICES];
    };
    // channels(i, m): the first channel of a part of the tile. The parts of a matrix belong to one section.
    template <class F>
    __device__ __forceinline__ void load_up(UpRanks& x, int slot, int rank, int at, const F& channels) const {
        const __half* up = side.up(slot, rank);
        const int group = threadIdx.x % WARP / 4;
#pragma unroll
        for (int m = 0; m < MATRICES; ++m)
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                x.low[i][m] = side.up_ranks(up, rank, channels(i, m) + group, at);
                x.high[i][m] = side.up_ranks(up, rank, channels(i, m) + group + 8, at);
            }
    }
    __device__ __forceinline__ void load_inputs(Inputs& x, const int (&sections)[MATRICES], int at) const {
        const int group = threadIdx.x % WARP / 4;
#pragma unroll
        for (int m = 0; m < MATRICES; ++m)
#pragma unroll
            for (int h = 0; h < RIGHT; ++h)
                x.of[m][h] =
                    side.input_ranks(min(row_of(h * 8 + group), rows - 1), min(sections[m], side.sections - 1), at);
    }
    // Loads `up` of the first step of a tile, which does not depend on the kernel of the inputs.
    template <class F>
    __device__ __forceinline__ void begin(Ahead& ahead, const F& channels) const {
        if constexpr (!IS_AHEAD) return;
        const unsigned left = __ballot_sync(FULL, own_rank > 0);
        const int from = left ? __ffs(left) - 1 : 0;
        const int slot = __shfl_sync(FULL, own_slot, from), rank = __shfl_sync(FULL, own_rank, from);
        if (left) load_up(ahead.up, slot, rank, 0, channels);
    }
    // found: the sums of the tile of begin(). is_first: it is the first tile of the block. The operands of a step are
    // loaded while the step before is multiplied.
    template <class F>
    __device__ __forceinline__ void add(
        float (&found)[COUNT][TILES][MATRICES], Ahead& ahead, bool is_first, const F& channels) const {
        const int lane = threadIdx.x % WARP, local = lane % 16, bit = lane / 16;
        float sums[COUNT][MATRICES][RIGHT][4] = {}, d[COUNT][MATRICES][RIGHT][4] = {};
        unsigned left = __ballot_sync(FULL, own_rank > 0);
        int slot = 0, rank = 0, at = 0;
        const auto next = [&] {  // the next step, unless `left` is empty
            at += RANKS;
            if (at < rank) return;
            if (slot) left &= ~__ballot_sync(FULL, own_slot == slot);
            const int from = left ? __ffs(left) - 1 : 0;
            slot = __shfl_sync(FULL, own_slot, from), rank = __shfl_sync(FULL, own_rank, from), at = 0;
        };
        bool is_same = IS_AHEAD && !is_first;
        int sections[MATRICES];
#pragma unroll
        for (int m = 0; m < MATRICES; ++m) {
            sections[m] = side.section(channels(0, m));
            is_same = is_same && sections[m] == ahead.sections[m];
        }
        if (left && !is_same) {
            load_inputs(ahead.inputs, sections, 0);
#pragma unroll
            for (int m = 0; m < MATRICES; ++m) ahead.sections[m] = sections[m];
        }
        UpRanks up, next_up = ahead.up;
        Inputs inputs, next_inputs = ahead.inputs;
        next();
        if (!IS_AHEAD && left) load_up(next_up, slot, rank, at, channels);
#pragma unroll 1
        while (left) {
            up = next_up, inputs = next_inputs;
            const int now = slot;
            next();
            if (left) {
                load_up(next_up, slot, rank, at, channels);
                next_inputs = ahead.inputs;
                if (!IS_AHEAD || at) load_inputs(next_inputs, sections, at);
            }
            const bool is_last = !left || slot != now;
#pragma unroll
            for (int i = 0; i < COUNT; ++i)
#pragma unroll
                for (int m = 0; m < MATRICES; ++m)
#pragma unroll
                    for (int h = 0; h < RIGHT; ++h) {
                        mma_ranks(d[i][m][h], up.low[i][m], up.high[i][m], inputs.of[m][h]);
                        if (!is_last) continue;
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            if (slots[h][e % 2] == now) sums[i][m][h][e] = d[i][m][h][e];
                            d[i][m][h][e] = 0;
                        }
                    }
        }
        // From the lanes of the sums to those that store them: channel `local`, row `bit` of a tile.
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
#pragma unroll
            for (int m = 0; m < MATRICES; ++m)
#pragma unroll
                for (int t = 0; t < TILES; ++t) {
                    float of[4];
#pragma unroll
                    for (int e = 0; e < 4; ++e) of[e] = __shfl_sync(FULL, sums[i][m][t / 4][e], local % 8 * 4 + t % 4);
                    const float first = bit ? of[1] : of[0], second = bit ? of[3] : of[2];
                    found[i][t][m] = local < 8 ? first : second;
                }
    }
};

// The warpgroup that applies the epilogue. Thread t has the rows 8 i + t / 16 of x, and channel t % 16 of each part of
// a tile; the two parts of a gated layer are gate and up.
template <int TILES, int EPILOGUE, int F, class Side>
__device__ __forceinline__ void epilogue_warps(
    const Shared<TILES>& shared, const WorkTile& work, const Outputs& outputs, const Side& side) {
    constexpr int MATRICES = EPILOGUE == GATED ? 2 : 1, COUNT = PARTS / MATRICES;
    constexpr bool HAS_SIDE = Side::EXISTS;
    const int local = threadIdx.x % PART_ROWS, token = threadIdx.x / PART_ROWS, rank = block_rank_in_cluster();
    const int index_in_part =
        (local % 8 * 4 + token / 2) * 4 + local / 8 * 2 + token % 2;  // the order of wgmma's accumulators
    Channel channels[COUNT][MATRICES];
    const auto channel_of = [&](int tile, int i) {
        return (((work.first + tile) * CLUSTER + rank) * COUNT + i) * PART_ROWS + local;
    };
    const auto load_channels = [&](int tile) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
#pragma unroll
            for (int m = 0; m < MATRICES; ++m) {
                const int at = m * outputs.count + channel_of(tile, i);
                const bool inside = EPILOGUE != TO_INT32 && channel_of(tile, i) < outputs.count;
                channels[i][m] = {
                    inside ? __ldg(outputs.w_scale + at) : 0.0f,
                    inside && outputs.bias ? __ldg(outputs.bias + at) : 0.0f};
            }
    };
    load_channels(0);
    using Sums = typename Conditional<HAS_SIDE, SideSums<TILES, COUNT, MATRICES>, NoSums<TILES, COUNT, MATRICES>>::type;
    const Sums side_sums(side, outputs.rows);
    side_sums.prefetch(work.tiles, [&](int tile, int m) { return m * outputs.count + channel_of(tile, 0) - local; });
    const auto outputs_of = [&](int tile) {
        return [&, tile](int i, int m) { return m * outputs.count + channel_of(tile, i) - local; };
    };
    typename Sums::Ahead ahead;
    side_sums.begin(ahead, outputs_of(0));
    wait_on_dependent_grids();
    float x_scale[TILES];
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
        const int row = t * 8 + token;
        x_scale[t] = EPILOGUE != TO_INT32 && row < outputs.rows ? __ldcg(outputs.x_scale + row) : 0.0f;
    }
    PipelineState buffer(2);
    for (int tile = 0; tile < work.tiles; ++tile, buffer.next()) {
        float added[COUNT][TILES][MATRICES];
        if constexpr (HAS_SIDE) {
            side_sums.add(added, ahead, tile == 0, outputs_of(tile));
            if (tile + 1 < work.tiles) side_sums.begin(ahead, outputs_of(tile + 1));
        }
        float residual[COUNT][TILES];
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
                const int row = t * 8 + token, channel = channel_of(tile, i);
                const float* residuals = static_cast<const float*>(outputs.out) + row * outputs.pitch + channel;
                residual[i][t] =
                    EPILOGUE == ADD && channel < outputs.count && row < outputs.rows ? __ldcg(residuals) : 0.0f;
            }
        mbarrier_wait(shared.sums_full(buffer.index), buffer.phase);
        int sums[COUNT][TILES][MATRICES] = {};
#pragma unroll
        for (int from = 0; from < CLUSTER; ++from)
#pragma unroll
            for (int p = 0; p < PARTS; ++p)
#pragma unroll
                for (int t = 0; t < TILES; ++t)
                    sums[p / MATRICES][t][p % MATRICES] += ld_shared(
                        shared.sums_of(from, buffer.index) +
                        ((p * TILES + t) * WARP * 4 + index_in_part) * sizeof(int));
        if (tile + 2 < work.tiles) {  // not for the last tiles: the other block may have ended
            sync_threads<WARPGROUP>();
            if (threadIdx.x == 0) shared.expect_sums(buffer.index);
            if (threadIdx.x < CLUSTER) mbarrier_arrive_remote(shared.sums_empty(buffer.index), threadIdx.x);
        }
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
                const int row = t * 8 + token, channel = channel_of(tile, i);
                if (row < outputs.rows && channel < outputs.count)
                    store_scaled<EPILOGUE, F>(
                        outputs.out, row * outputs.pitch + channel, sums[i][t], x_scale[t], channels[i],
                        outputs.bias != nullptr, residual[i][t], HAS_SIDE ? added[i][t] : nullptr);
            }
        if (tile + 1 < work.tiles) load_channels(tile + 1);
    }
}

// The operands of the kernel but its side product, and the kernel.
struct Product {
    const float *x_scale, *w_scale, *bias;
    void* out;
    long long out_pitch;
    int rows, n, tiles, steps, stages;
    bool resident;
};

template <int TILES, int EPILOGUE, int F, class Side>
__device__ __forceinline__ void multiply(
    const Product& product, const TensorMap& x_map, const TensorMap& w_map, const Side& side) {
    constexpr bool IS_GATED = EPILOGUE == GATED;
    extern __shared__ __align__(1024) char memory[];
    launch_dependent_grids();
    const Shared<TILES> shared(memory, product.stages, (product.steps + CLUSTER - 1) / CLUSTER, product.resident);
    const WorkTile work(product.tiles, product.steps);
    const int outputs = IS_GATED ? product.n / 2 : product.n;
    WeightProducer<TILES, IS_GATED> weight = {
        shared, work, w_map, outputs, PipelineState(product.stages), PipelineState(product.stages)};
    if (threadIdx.x == FIRST_LOADER) {
        shared.init();
        for (int i = 0; i < WINDOW && weight.remaining(); ++i) weight.load();
    }
    __syncwarp();
    cluster_arrive_relaxed<CLUSTER>();
    cluster_wait<CLUSTER>();
    if (threadIdx.x == FIRST_LOADER) {
        while (weight.remaining()) weight.load();
    } else if (threadIdx.x == FIRST_LOADER + WARP) {
        prefetch_tensormap(x_map);
        if constexpr (Side::EXISTS)  // the kernel of its inputs has not ended: the epilogue's warps wait for that
            side.wait_for_operands(product.rows), fence_proxy_async_global();
        else
            wait_on_dependent_grids();
        load_activations(shared, work, x_map);
    } else if (threadIdx.x < WARPGROUP) {
        epilogue_warps<TILES, EPILOGUE, F>(
            shared, work,
            {product.x_scale, product.w_scale, product.bias, product.out, product.out_pitch, product.rows, outputs},
            side);
    } else if (threadIdx.x < FIRST_LOADER) {
        mma_warps<TILES, IS_GATED>(shared, work);
    }
}

// TILES: tiles of 8 rows of x. F: the function of GATED and ACTIVATED. Boxes of the tensor maps, of DEPTH columns:
// x_map 8 * TILES rows; w_map 64 rows, or 32 with GATED. `tiles` tiles and `steps` stages of BOXES * DEPTH columns
// cover the weight. Clusters of CLUSTER blocks. `stages` >= WINDOW and `resident`: see Shared, which is the dynamic
// shared memory. One block fits an SM. The bound for 8 tiles limits registers, so that it fits beside a block of the
// kernel that quantizes its input.
template <int TILES, int EPILOGUE, int F>
__global__ void __launch_bounds__(THREADS, TILES == 8 ? 2 : 1) skinny_gemm_hopper(
    const float* x_scale, const float* w_scale, const float* bias, void* out, long long out_pitch, int rows, int n,
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, int tiles, int steps, int stages,
    bool resident) {
    multiply<TILES, EPILOGUE, F>(
        {x_scale, w_scale, bias, out, out_pitch, rows, n, tiles, steps, stages, resident}, x_map, w_map, NoSide());
}

// The same with a side product. The sections of its weight end at multiples of PARTS * PART_ROWS channels, those that a
// block finishes of a tile.
template <int TILES, int EPILOGUE, int F>
__global__ void __launch_bounds__(THREADS, TILES > 4 ? 1 : 2) skinny_gemm_hopper_adapted(
    const SideProduct side, const float* x_scale, const float* w_scale, const float* bias, void* out,
    long long out_pitch, int rows, int n, const __grid_constant__ TensorMap x_map,
    const __grid_constant__ TensorMap w_map, int tiles, int steps, int stages, bool resident) {
    multiply<TILES, EPILOGUE, F>(
        {x_scale, w_scale, bias, out, out_pitch, rows, n, tiles, steps, stages, resident}, x_map, w_map, side);
}

}  // namespace bminf

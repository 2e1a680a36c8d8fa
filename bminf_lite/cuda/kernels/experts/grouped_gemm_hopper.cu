// int8 products of sorted pairs with the weights of their experts by TMA and wgmma, on compute capability 9.0: the
// results of grouped_gemm.cu, for decoding and for prompts.
//
// The left operand of wgmma is a tile of BLOCK_M channels of one expert, the right operand the rows of a tile
// (schedule.cuh). The instruction's width is one of WIDTHS, the smallest that the rows fit, so no expert is padded to
// another's number of rows.
//
// The kernel is persistent and warp-specialised: one thread loads stages of BLOCK_K columns of both operands; two
// warpgroups multiply one half of the channels each, apply the epilogue, and write through shared memory, where their
// results are transposed: the sums of a thread are neighbouring rows of x, a row of the result are channels.
#include "common/async.cuh"
#include "common/common.cuh"
#include "common/wgmma.cuh"
#include "constants/epilogue.cuh"
#include "constants/grouped_gemm_hopper.cuh"
#include "experts/activation.cuh"
#include "experts/pair_side.cuh"
#include "experts/schedule.cuh"
#include "experts/slots.cuh"

namespace bminf {

constexpr int WARPS = 2 * WARPGROUP / WARP;  // that multiply
constexpr int SMALL_BOX = 8, BOX = 32;       // rows of x in a box of the two tensor maps
constexpr int CLAIM_AHEAD = 4;               // steps from claiming a tile to its first one

// The width of the instruction for a tile of `rows` rows.
__device__ __forceinline__ int width_for(int rows) { return rows <= 8 ? 8 : rows <= 16 ? 16 : (rows + 31) / 32 * 32; }

// Shared memory of a block: `stages` stages of BLOCK_M channels of the weight and then MAX_N rows of x; two pieces of
// results of each warpgroup; two buffers of the scales of a tile's rows for each; for each stage STAGE_STATE_BYTES
// for two barriers and the number of a tile that begins with it; tiles.
template <int BLOCK_M, int MAX_N>
struct GroupedShared {
    static constexpr int STAGE = (BLOCK_M + MAX_N) * BLOCK_K;
    static constexpr int PIECE_BYTES = BLOCK_M == 128 ? 4096 : 2048;  // of a piece
    char* memory;
    int stages;

    __device__ __forceinline__ unsigned weight(int stage) const {
        return cast_smem_ptr_to_uint(memory) + stage * STAGE;
    }
    __device__ __forceinline__ unsigned rows(int stage) const { return weight(stage) + BLOCK_M * BLOCK_K; }
    __device__ __forceinline__ char* piece(int group, int buffer) const {
        return memory + stages * STAGE + (group * 2 + buffer) * PIECE_BYTES;
    }
    __device__ __forceinline__ float* scales(int group, int buffer) const {
        return reinterpret_cast<float*>(memory + stages * STAGE + 4 * PIECE_BYTES) + (group * 2 + buffer) * MAX_N;
    }
    __device__ __forceinline__ unsigned full(int stage) const {
        return cast_smem_ptr_to_uint(scales(2, 0)) + stage * STAGE_STATE_BYTES;
    }
    __device__ __forceinline__ unsigned empty(int stage) const { return full(stage) + 8; }
    __device__ __forceinline__ unsigned number(int stage) const { return full(stage) + 16; }
    __device__ __forceinline__ ExpertTiles& tiles() const {
        return *reinterpret_cast<ExpertTiles*>(reinterpret_cast<char*>(scales(2, 0)) + stages * STAGE_STATE_BYTES);
    }
    __device__ __forceinline__ void init() const {
        for (int i = 0; i < stages; ++i) {
            mbarrier_init(full(i), 1);
            mbarrier_init(empty(i), WARPS);
        }
        fence_mbarrier_init();
    }
};

// ---- the loads ---------------------------------------------------------------------------------------------------

// The thread that loads. `n`: channels of an expert; slots: see slots.cuh; claimed: see Products.
//
// A block claims another tile when it is about to have loaded one. Tiles have different numbers of rows, so with a
// fixed share of them some blocks would work longer than others.
template <int BLOCK_M, int MAX_N>
struct Producer {
    const GroupedShared<BLOCK_M, MAX_N>& shared;
    const TensorMap &small_map, &x_map, &w_map;
    const int* slots;
    int* claimed;
    int n, steps;

    // Loads the tiles of this block, of `end` tiles, and then says that it has no more. EARLY: see the kernel.
    template <bool EARLY>
    __device__ __forceinline__ void run(const ExpertTiles& tiles, int experts, int weight_tiles, int end) const {
        if constexpr (EARLY) {
            if (blockIdx.x < end) {
                const int early = min(shared.stages, steps);
                const ExpertTile tile = tiles.find<BOX>(blockIdx.x, experts, weight_tiles);
                const int channel = first_channel(tile);
                for (int step = 0; step < early; ++step) load_weight(tile, blockIdx.x, channel, step, step);
            }
            wait_on_dependent_grids();
        }
        PipelineState pipe(shared.stages);
        int index = blockIdx.x;
        for (bool is_first = true; index < end; is_first = false) {
            const ExpertTile tile = tiles.find<BOX>(index, experts, weight_tiles);
            const int channel = first_channel(tile);
#pragma unroll 1
            for (int step = 0; step < steps; ++step, pipe.next()) {
                if (!EARLY || !is_first || step >= shared.stages) {
                    mbarrier_wait(shared.empty(pipe.index), pipe.phase ^ 1);
                    load_weight(tile, index, channel, step, pipe.index);
                }
                load_rows(tile, step, pipe.index);
                if (step == max(0, steps - CLAIM_AHEAD)) index = gridDim.x + atomicAdd(claimed, 1);
            }
        }
        mbarrier_wait(shared.empty(pipe.index), pipe.phase ^ 1);
        st_shared_word(shared.number(pipe.index), end);
        mbarrier_arrive(shared.full(pipe.index));
    }

private:
    // Of the tile, among the weights of all experts or slots.
    __device__ __forceinline__ int first_channel(const ExpertTile& tile) const {
        return slot_of(slots, tile.expert) * n + tile.weight_tile * BLOCK_M;
    }
    // index: that of the tile, which counts for its first step.
    __device__ __forceinline__ void load_weight(
        const ExpertTile& tile, int index, int channel, int step, int stage) const {
        if (step == 0) st_shared_word(shared.number(stage), index);
        mbarrier_arrive_expect_tx(shared.full(stage), (BLOCK_M + width_for(tile.rows)) * BLOCK_K);
#pragma unroll
        for (int i = 0; i < BLOCK_M / W_BOX; ++i)
            tma_load_2d(
                shared.weight(stage) + i * W_BOX * BLOCK_K, w_map, step * BLOCK_K, channel + i * W_BOX,
                shared.full(stage));
    }
    __device__ __forceinline__ void load_rows(const ExpertTile& tile, int step, int stage) const {
        const int width = width_for(tile.rows), column = step * BLOCK_K;
        const bool is_small = width < BOX;
        const TensorMap& map = is_small ? small_map : x_map;
        const int box = is_small ? SMALL_BOX : BOX;
#pragma unroll 1
        for (int row = 0; row < width; row += box)
            tma_load_2d(shared.rows(stage) + row * BLOCK_K, map, column, tile.row + row, shared.full(stage));
    }
};

// ---- the products ------------------------------------------------------------------------------------------------

// Stores an [8, 8] matrix of 16-bit elements transposed: this thread has the elements (t / 4, t % 4 * 2) and its right
// neighbour. Lane t < 8 gives the address of column t.
__device__ __forceinline__ void stmatrix_trans(unsigned column, unsigned pair) {
    asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(column), "r"(pair) : "memory");
}

// A number as a type.
template <int VALUE>
struct Constant {
    static constexpr int value = VALUE;
};

// A barrier of one of the warpgroups that multiply.
__device__ __forceinline__ void sync_warpgroup(int group) {
    asm volatile("bar.sync %0, %1;" ::"r"(2 + group), "n"(WARPGROUP) : "memory");
}

// What the products need besides their operands. n: channels of an expert.
struct GroupedResult {
    const float *x_scale, *w_scale, *bias;
    __half* out;
    long long pitch;
    int n;
    Clamp clamp;
};

// The work of a warpgroup that multiplies. Side: PairSide or NoSide.
template <int BLOCK_M, int MAX_N, int EPILOGUE, int F, class Side>
struct Consumer {
    static constexpr bool IS_GATED = EPILOGUE == GATED;
    static constexpr int BLOCKS = BLOCK_M / WARPGROUP;             // of 64 channels that a warpgroup has
    static constexpr int OUTPUTS = BLOCKS * (IS_GATED ? 32 : 64);  // columns of the result from them
    static constexpr int PIECE_ROWS = GroupedShared<BLOCK_M, MAX_N>::PIECE_BYTES / (2 * OUTPUTS);  // rows of a piece
    static constexpr int CHUNKS = OUTPUTS / 8;  // of 16 bytes in a row of a piece
    using Sums = SumsOf<Side, BLOCKS, 64, IS_GATED>;
    using Inputs = typename Sums::Inputs;
    const GroupedShared<BLOCK_M, MAX_N>& shared;
    const GroupedResult& result;
    int group, steps;
    PipelineState pipe;
    Sums side;
    int buffer = 0, scales_buffer = 0;

    // The place of 16 bytes in a piece, such that eight rows' are in different banks.
    __device__ __forceinline__ static unsigned place(int row, int chunk) {
        constexpr int EACH = CHUNKS < 8 ? 8 / CHUNKS : 1;  // rows of 128 bytes
        return row * (OUTPUTS * 2) + (chunk ^ (row / EACH % (CHUNKS < 8 ? CHUNKS : 8))) * 16;
    }

    // The number of the tile that begins with the next stage.
    __device__ __forceinline__ int next_tile() const {
        mbarrier_wait(shared.full(pipe.index), pipe.phase);
        return ld_shared(shared.number(pipe.index));
    }

    __device__ __forceinline__ void compute(const ExpertTile& tile) {
        switch (width_for(tile.rows)) {
            case 8:
                return compute_width<8>(tile);
            case 16:
                return compute_width<16>(tile);
            case 32:
                return compute_width<32>(tile);
            case 64:
                return compute_width<64>(tile);
            case 96:
                return compute_width<96>(tile);
            case 128:
                return compute_width<128>(tile);
            case 160:
                return compute_width<160>(tile);
        }
    }

private:
    // The scales and biases of a thread's channels. They are loaded before the products.
    struct Channels {
        float scale[BLOCKS][2], bias[BLOCKS][2];

        __device__ __forceinline__ Channels(const GroupedResult& result, const ExpertTile& tile, int group) {
            const int warp = threadIdx.x % WARPGROUP / WARP, lane = threadIdx.x % WARP;
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int channel =
                        tile.weight_tile * BLOCK_M + (group * BLOCKS + b) * 64 + warp * 16 + lane / 4 + h * 8;
                    const size_t at = static_cast<size_t>(tile.expert) * result.n + min(channel, result.n - 1);
                    scale[b][h] = ld_global(result.w_scale + at);
                    bias[b][h] = result.bias ? ld_global(result.bias + at) : 0.0f;
                }
        }
    };

    template <int N>
    __device__ __forceinline__ void compute_width(const ExpertTile& tile) {
        if constexpr (N <= MAX_N) {
            const int thread = threadIdx.x % WARPGROUP;
            float* scales = shared.scales(group, scales_buffer);
            scales_buffer ^= 1;
            const Channels channels(result, tile, group);
            constexpr int EACH = (N + WARPGROUP - 1) / WARPGROUP;
            float own[EACH];  // loaded before the products; behind the last row its scale once more
#pragma unroll
            for (int i = 0; i < EACH; ++i)
                own[i] = ld_global_cg(result.x_scale + tile.row + min(i * WARPGROUP + thread, tile.rows - 1));
            Inputs inputs[most_groups(N / 8)];  // of the first piece
            if constexpr (Side::EXISTS) {
                load_inputs(tile, 0, inputs);
                side.begin(
                    tile.expert, tile.weight_tile * BLOCK_M + group * BLOCKS * 64 + thread / WARP * 16, inputs[0]);
            }
            int c[BLOCKS][N / 8][4] = {};  // otherwise the registers of all widths would be live at the same time
            multiply(c);
#pragma unroll
            for (int i = 0; i < EACH; ++i)
                if (i * WARPGROUP + thread < N) scales[i * WARPGROUP + thread] = own[i];
            sync_warpgroup(group);
            store(tile, c, scales, channels, inputs);
        }
    }

    // Groups of eight rows in a piece of a tile of `groups`. Side products of two would take too many registers.
    __device__ __forceinline__ static constexpr int most_groups(int groups) {
        const int most = PIECE_ROWS < 16 || (Side::EXISTS && BLOCKS > 1) ? 1 : 2;
        return groups < most ? groups : most;
    }

    // The inputs of the adapters of a piece, whose first group is `first`.
    template <int EACH>
    __device__ __forceinline__ void load_inputs(const ExpertTile& tile, int first, Inputs (&inputs)[EACH]) const {
#pragma unroll
        for (int g = 0; g < EACH; ++g) inputs[g] = side.load(tile.row + (first + g) * 8, tile.row + tile.rows - 1);
    }

    // GROUPS: of eight rows.
    template <int GROUPS>
    __device__ __forceinline__ void multiply(int (&c)[BLOCKS][GROUPS][4]) {
        const int lane = threadIdx.x % WARP;
        int previous = 0;
#pragma unroll 1
        for (int step = 0; step < steps; ++step, pipe.next()) {
            mbarrier_wait(shared.full(pipe.index), pipe.phase);
            const unsigned long long x = make_smem_desc(shared.rows(pipe.index), 0);
            wgmma_fence();
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b) {
                const unsigned long long w =
                    make_smem_desc(shared.weight(pipe.index) + (group * BLOCKS + b) * 64 * BLOCK_K, 0);
#pragma unroll
                for (int i = 0; i < BLOCK_K / 32; ++i) wgmma(c[b], w + i * 2, x + i * 2, true);
            }
            wgmma_commit_group();
            wgmma_wait_group<1>();
            if (step > 0 && lane == 0) mbarrier_arrive(shared.empty(previous));
            previous = pipe.index;
        }
        wgmma_wait_group<0>();
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) warpgroup_fence_operand(c[b]);
        if (lane == 0) mbarrier_arrive(shared.empty(previous));
    }

    // The sums of EACH groups from `first` on, a multiple of EACH: a piece. A tile has at most 20 pieces. With code of
    // its own for each, a kernel would not fit the instruction cache. So all share code that reads a copy of the sums.
    template <int EACH, int GROUPS>
    __device__ __forceinline__ static void take(
        int (&taken)[BLOCKS][EACH][4], const int (&c)[BLOCKS][GROUPS][4], int first) {
        static_assert(GROUPS <= 20 * EACH);
        const auto copy = [&](auto piece) {
            constexpr int FROM = decltype(piece)::value * EACH;
            if constexpr (FROM < GROUPS)
#pragma unroll
                for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
                    for (int g = 0; g < EACH; ++g)
#pragma unroll
                        for (int i = 0; i < 4; ++i) taken[b][g][i] = c[b][FROM + g][i];
        };
        switch (first / EACH) {
#define TAKE(PIECE)              \
    case PIECE:                  \
        copy(Constant<PIECE>()); \
        break;
            TAKE(0)
            TAKE(1)
            TAKE(2)
            TAKE(3)
            TAKE(4)
            TAKE(5)
            TAKE(6)
            TAKE(7)
            TAKE(8)
            TAKE(9)
            TAKE(10)
            TAKE(11)
            TAKE(12)
            TAKE(13)
            TAKE(14)
            TAKE(15)
            TAKE(16)
            TAKE(17)
            TAKE(18)
            TAKE(19)
#undef TAKE
        }
    }

    // Scales the sums and writes the results, a piece at a time. ahead: the inputs of the first one.
    template <int GROUPS, int EACH>
    __device__ __forceinline__ void store(
        const ExpertTile& tile, const int (&c)[BLOCKS][GROUPS][4], const float* scales, const Channels& channels,
        Inputs (&ahead)[EACH]) {
        const int thread = threadIdx.x % WARPGROUP, warp = thread / WARP, lane = thread % WARP;
#pragma unroll 1
        for (int first = 0; first * 8 < tile.rows; first += EACH) {
            int taken[BLOCKS][EACH][4];
            take(taken, c, first);
            Inputs inputs[EACH];
            if constexpr (Side::EXISTS) {
#pragma unroll
                for (int g = 0; g < EACH; ++g) inputs[g] = ahead[g];
                if ((first + EACH) * 8 < tile.rows) load_inputs(tile, first + EACH, ahead);
            }
            const unsigned piece = cast_smem_ptr_to_uint(shared.piece(group, buffer));
#pragma unroll
            for (int g = 0; g < EACH; ++g) {
                const float2 x = *reinterpret_cast<const float2*>(scales + (first + g) * 8 + lane % 4 * 2);
#pragma unroll
                for (int b = 0; b < BLOCKS; ++b) {
                    const int (&sums)[4] = taken[b][g];
                    float found[4];
                    if constexpr (Side::EXISTS)
                        side.products(b, inputs[g], tile.row + (first + g) * 8, tile.row + tile.rows - 1, found);
                    float y[2][2];  // of both channels, of both rows
#pragma unroll
                    for (int h = 0; h < 2; ++h)
#pragma unroll
                        for (int i = 0; i < 2; ++i) {
                            y[h][i] = scaled(__int2float_rn(sums[2 * h + i]), i ? x.y : x.x, channels.scale[b][h]);
                            if constexpr (Side::EXISTS) y[h][i] = add_side(y[h][i], found[2 * h + i]);
                            if (result.bias) y[h][i] = __fadd_rn(y[h][i], channels.bias[b][h]);
                        }
                    const int row = g * 8 + lane % 8;
                    if constexpr (IS_GATED) {
                        const unsigned pair = pack_half2(
                            expert_activation<true, F>(y[0][0], y[1][0], result.clamp),
                            expert_activation<true, F>(y[0][1], y[1][1], result.clamp));
                        stmatrix_trans(piece + place(row, b * 4 + warp), pair);
                    } else {
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            if constexpr (EPILOGUE == ACTIVATED)
#pragma unroll
                                for (int i = 0; i < 2; ++i)
                                    y[h][i] = expert_activation<false, F>(y[h][i], 0.0f, result.clamp);
                            stmatrix_trans(piece + place(row, (b * 4 + warp) * 2 + h), pack_half2(y[h][0], y[h][1]));
                        }
                    }
                }
            }
            sync_warpgroup(group);
            copy_piece(tile, first * 8, EACH * 8);
            buffer ^= 1;
        }
    }

    // Writes a piece, of `count` rows of the tile from `first` on.
    __device__ __forceinline__ void copy_piece(const ExpertTile& tile, int first, int count) const {
        const int outputs = IS_GATED ? result.n / 2 : result.n;
        const int column = (tile.weight_tile * 2 + group) * OUTPUTS;
        const char* piece = shared.piece(group, buffer);
        for (int i = threadIdx.x % WARPGROUP; i < count * CHUNKS; i += WARPGROUP) {
            const int row = i / CHUNKS, chunk = i % CHUNKS;
            if (first + row >= tile.rows || column + chunk * 8 >= outputs) continue;
            *reinterpret_cast<uint4*>(result.out + (tile.row + first + row) * result.pitch + column + chunk * 8) =
                *reinterpret_cast<const uint4*>(piece + place(row, chunk));
        }
    }
};

// The operands of the products but their tensor maps and what adapters add. `steps` stages cover a row of x. claimed:
// how many tiles blocks have claimed behind the first one of each; 0 before.
struct Products {
    const float* x_scale;
    const int *offsets, *slots;
    int* claimed;
    const float *w_scale, *bias;
    __half* out;
    long long out_pitch;
    int experts, n, steps, stages;
    Clamp clamp;
};

template <int BLOCK_M, int MAX_N, int EPILOGUE, int F, bool EARLY, class Side>
__device__ __forceinline__ void multiply(
    const Products& products, const TensorMap& x8_map, const TensorMap& x_map, const TensorMap& w_map,
    const Side& side) {
    extern __shared__ __align__(1024) char memory[];
    const GroupedShared<BLOCK_M, MAX_N> shared = {memory, products.stages};
    if (threadIdx.x == 2 * WARPGROUP) shared.init();
    if constexpr (!EARLY) wait_on_dependent_grids();
    launch_dependent_grids();  // not before, because kernels behind the next one read the offsets early
    ExpertTiles& tiles = shared.tiles();
    const int experts = products.experts, n = products.n;
    tiles.load<MAX_N>(products.offsets, experts);  // and the barriers
    const int weight_tiles = (n + BLOCK_M - 1) / BLOCK_M, end = tiles.starts[experts] * weight_tiles;
    if (threadIdx.x >= 2 * WARPGROUP) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 2 * WARPGROUP)
            Producer<BLOCK_M, MAX_N>{shared, x8_map, x_map, w_map, products.slots, products.claimed, n, products.steps}
                .template run<EARLY>(tiles, experts, weight_tiles, end);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        if constexpr (EARLY) wait_on_dependent_grids();
        const GroupedResult result = {
            products.x_scale, products.w_scale, products.bias, products.out, products.out_pitch, n, products.clamp};
        using Worker = Consumer<BLOCK_M, MAX_N, EPILOGUE, F, Side>;
        Worker consumer = {
            shared,
            result,
            static_cast<int>(threadIdx.x) / WARPGROUP,
            products.steps,
            PipelineState(products.stages),
            typename Worker::Sums(side)};
        for (int index = blockIdx.x; index < end; index = consumer.next_tile())
            consumer.compute(tiles.find<BOX>(index, experts, weight_tiles));
    }
}

// BLOCK_M: channels of a tile, 128 or 256. MAX_N: rows of a tile at most, one of the widths. F: see expert_activation.
// Boxes of the tensor maps, of BLOCK_K columns: x8_map 8 rows, x_map 32 rows, w_map W_BOX rows of the weights of all
// experts, or slots. n: channels of an expert, a multiple of 8, or with GATED of 16. EARLY: the offsets were complete
// before the kernel could start, so the first stages of the weight are loaded before it waits for its input. Dynamic
// shared memory: see GroupedShared.
template <int BLOCK_M, int MAX_N, int EPILOGUE, int F, bool EARLY>
__global__ void __launch_bounds__(3 * WARPGROUP, 1) grouped_gemm_hopper(
    const float* x_scale, const int* offsets, const int* slots, int* claimed, const float* w_scale, const float* bias,
    __half* out, long long out_pitch, int experts, int n, int steps, int stages, float limit, float alpha,
    const __grid_constant__ TensorMap x8_map, const __grid_constant__ TensorMap x_map,
    const __grid_constant__ TensorMap w_map) {
    multiply<BLOCK_M, MAX_N, EPILOGUE, F, EARLY>(
        {x_scale, offsets, slots, claimed, w_scale, bias, out, out_pitch, experts, n, steps, stages, {limit, alpha}},
        x8_map, x_map, w_map, NoSide());
}

// The same with what adapters add.
template <int BLOCK_M, int MAX_N, int EPILOGUE, int F, bool EARLY>
__global__ void __launch_bounds__(3 * WARPGROUP, 1) grouped_gemm_hopper_adapted(
    const PairSide side, const float* x_scale, const int* offsets, const int* slots, int* claimed, const float* w_scale,
    const float* bias, __half* out, long long out_pitch, int experts, int n, int steps, int stages, float limit,
    float alpha, const __grid_constant__ TensorMap x8_map, const __grid_constant__ TensorMap x_map,
    const __grid_constant__ TensorMap w_map) {
    multiply<BLOCK_M, MAX_N, EPILOGUE, F, EARLY>(
        {x_scale, offsets, slots, claimed, w_scale, bias, out, out_pitch, experts, n, steps, stages, {limit, alpha}},
        x8_map, x_map, w_map, side);
}

}  // namespace bminf

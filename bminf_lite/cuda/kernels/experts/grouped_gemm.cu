// int8 products of sorted pairs with the weights of their experts by mma.sync: one launch for all experts, whatever the
// number of rows of each.
//
//     y = x_scale[row] * (w_scale[expert, channel] * (x[row] @ weight[expert].T)) + bias[expert, channel]
//     out = fp16(y), or fp16(f(fp16(y))), or fp16(f(fp16(gate)) * fp16(up))
//
// x: int8 [pairs, pitch], sorted by expert; x_scale: fp32 [pairs]; offsets: [experts + 1]; weight: int8 [experts, n,
// pitch], or in slots (slots.cuh); w_scale, bias: fp32 [experts, n]; out: fp16 [pairs, out_pitch]. The rows of gate and
// up alternate in groups of eight, so a thread has both sums of an output.
//
// The weight is the left operand, in tiles of GROUPED_ROWS channels, and the rows of one expert are the right operand,
// in tiles of up to 8 * TILES rows (schedule.cuh). Blocks are persistent. Their pipeline of stages of GROUPED_COLUMNS
// columns goes on from one tile to the next. The order of k within an instruction is arbitrary as long as both operands
// agree, so each lane reads 16 contiguous bytes and uses them for two instructions.
#include "common/async.cuh"
#include "common/common.cuh"
#include "constants/epilogue.cuh"
#include "experts/activation.cuh"
#include "experts/pair_side.cuh"
#include "experts/schedule.cuh"
#include "experts/slots.cuh"

using namespace bminf;

constexpr int STAGES = PIPELINE_STAGES;
constexpr int PIECES = GROUPED_COLUMNS / 16;  // of 16 bytes in a row of a stage
constexpr int CHANNELS = 16;                  // of a warp: the M of one MMA
static_assert(GROUPED_ROWS == GROUPED_THREADS / WARP * CHANNELS);

__device__ __forceinline__ void mma_m16n8k32(int (&c)[4], const int (&a)[4], int b0, int b1) {
#if __CUDA_ARCH__ >= 800
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    const int b[2] = {b0, b1};
#pragma unroll
    for (int half = 0; half < 2; ++half)  // of k
#pragma unroll
        for (int m = 0; m < 2; ++m)
            asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
                         : "+r"(c[2 * m]), "+r"(c[2 * m + 1])
                         : "r"(a[2 * half + m]), "r"(b[half]));
#endif
}

// The place of 16 bytes in a stage: of eight lanes that read two rows at the same time, each has banks of its own.
__device__ __forceinline__ int place(int row, int piece) {
    return row * GROUPED_COLUMNS + (piece ^ (row % 2 * 4)) * 16;
}

// A position in the work of a block: a tile, and a stage of it.
struct Cursor {
    const ExpertTiles& tiles;
    const int* slots;
    int experts, weight_tiles, steps, index, end, step = 0, slot;
    ExpertTile tile;

    __device__ __forceinline__
    Cursor(const ExpertTiles& tiles, const int* slots, int experts, int weight_tiles, int steps)
        : tiles(tiles),
          slots(slots),
          experts(experts),
          weight_tiles(weight_tiles),
          steps(steps),
          index(blockIdx.x),
          end(tiles.starts[experts] * weight_tiles) {
        find();
    }
    __device__ __forceinline__ bool valid() const { return index < end; }
    __device__ __forceinline__ void next() {
        if (++step < steps) return;
        step = 0, index += gridDim.x;
        find();
    }

private:
    __device__ __forceinline__ void find() {
        if (valid()) tile = tiles.find(index, experts, weight_tiles), slot = slot_of(slots, tile.expert);
    }
};

// The outputs of one tile.
struct GroupedOutputs {
    const float *x_scale, *w_scale, *bias;
    __half* out;
    long long pitch;
    int n;
    Clamp clamp;

    // c: the sums of this warp's channels and of all rows of the tile. Side: PairSide or NoSide.
    template <int EPILOGUE, int F, class Side, int TILES>
    __device__ __forceinline__ void store(
        const ExpertTile& tile, const int (&c)[TILES][4], SumsOf<Side, 1, 0, EPILOGUE == GATED>& side) const {
        const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, last = tile.row + tile.rows - 1;
        const int first = tile.weight_tile * GROUPED_ROWS + warp * CHANNELS + lane / 4;
        typename SumsOf<Side, 1, 0, EPILOGUE == GATED>::Inputs ahead;
        if constexpr (Side::EXISTS) {
            ahead = side.load(tile.row, last);
            side.begin(tile.expert, first - lane / 4, ahead);
        }
        float scale[2], biases[2];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            const int channel = first + 8 * m;
            const size_t at = static_cast<size_t>(tile.expert) * n + channel;
            scale[m] = channel < n ? __ldg(w_scale + at) : 0.0f;
            biases[m] = bias && channel < n ? __ldg(bias + at) : 0.0f;
        }
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            float found[4];
            if constexpr (Side::EXISTS) {
                if (t * 8 >= tile.rows) break;
                const auto inputs = ahead;
                if ((t + 1) * 8 < tile.rows) ahead = side.load(tile.row + (t + 1) * 8, last);
                side.products(0, inputs, tile.row + t * 8, last, found);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int inside = t * 8 + lane % 4 * 2 + i;
                if (inside >= tile.rows) continue;
                const int row = tile.row + inside;
                const float factor = __ldcg(x_scale + row);
                float y[2];
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    y[m] = scaled(__int2float_rn(c[t][2 * m + i]), factor, scale[m]);
                    if constexpr (Side::EXISTS) y[m] = add_side(y[m], found[2 * m + i]);
                    if (bias) y[m] = __fadd_rn(y[m], biases[m]);
                }
                __half* target = out + row * pitch;
                if constexpr (EPILOGUE == GATED) {
                    const int feature = first / 16 * 8 + first % 8;
                    if (first < n) target[feature] = __float2half_rn(expert_activation<true, F>(y[0], y[1], clamp));
                } else {
#pragma unroll
                    for (int m = 0; m < 2; ++m)
                        if (first + 8 * m < n)
                            target[first + 8 * m] = __float2half_rn(
                                EPILOGUE == ACTIVATED ? expert_activation<false, F>(y[m], 0.0f, clamp) : y[m]);
                }
            }
        }
    }
};

// The operands of the products but what adapters add.
struct Products {
    const int8* x;
    const int* offsets;
    const int8* weight;
    const int* slots;
    GroupedOutputs outputs;
    int experts, k, pitch;
};

template <int TILES, int EPILOGUE, int F, class Side>
__device__ __forceinline__ void multiply(const Products& products, const Side& side) {
    const int experts = products.experts, n = products.outputs.n, k = products.k, pitch = products.pitch;
    constexpr int STAGE = (GROUPED_ROWS + 8 * TILES) * GROUPED_COLUMNS;
    extern __shared__ __align__(128) char shared[];
    ExpertTiles& tiles = *reinterpret_cast<ExpertTiles*>(shared + STAGES * STAGE);
    launch_dependent_grids();
    wait_on_dependent_grids();
    tiles.load<8 * TILES>(products.offsets, experts);
    const int weight_tiles = (n + GROUPED_ROWS - 1) / GROUPED_ROWS;
    const int steps = (k + GROUPED_COLUMNS - 1) / GROUPED_COLUMNS;
    Cursor ahead(tiles, products.slots, experts, weight_tiles, steps), now = ahead;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    SumsOf<Side, 1, 0, EPILOGUE == GATED> sums(side);

    const auto load = [&](int stage) {
        if (ahead.valid()) {
            const unsigned target = cast_smem_ptr_to_uint(shared + stage * STAGE);
            const int piece = threadIdx.x % PIECES, column = ahead.step * GROUPED_COLUMNS + piece * 16;
            const int from = column < k ? column : 0;  // an address that exists
            const int8* matrix = products.weight + static_cast<size_t>(ahead.slot) * n * pitch + from;
#pragma unroll
            for (int row = threadIdx.x / PIECES; row < GROUPED_ROWS; row += GROUPED_THREADS / PIECES) {
                const int channel = ahead.tile.weight_tile * GROUPED_ROWS + row;
                cp_async_16(
                    target + place(row, piece), matrix + static_cast<size_t>(min(channel, n - 1)) * pitch, column < k);
            }
#pragma unroll
            for (int row = threadIdx.x / PIECES; row < 8 * TILES; row += GROUPED_THREADS / PIECES)
                cp_async_16(
                    target + place(GROUPED_ROWS + row, piece),
                    products.x + static_cast<size_t>(ahead.tile.row + min(row, ahead.tile.rows - 1)) * pitch + from,
                    column < k);
            ahead.next();
        }
        cp_async_commit_group();
    };

    for (int i = 0; i < STAGES - 1; ++i) load(i);
    int c[TILES][4] = {};
    for (int stage = 0; now.valid(); stage = stage + 1 == STAGES ? 0 : stage + 1) {
        cp_async_wait_group<STAGES - 2>();
        __syncthreads();
        load(stage == 0 ? STAGES - 1 : stage - 1);
        const char* const from = shared + stage * STAGE;
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // 64 columns
            const int row = warp * CHANNELS + lane / 4, piece = half * 4 + lane % 4;
            const int4 low = *reinterpret_cast<const int4*>(from + place(row, piece));
            const int4 high = *reinterpret_cast<const int4*>(from + place(row + 8, piece));
            const int a[2][4] = {{low.x, high.x, low.y, high.y}, {low.z, high.z, low.w, high.w}};
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
                if (t * 8 >= now.tile.rows) break;
                const int4 b = *reinterpret_cast<const int4*>(from + place(GROUPED_ROWS + t * 8 + lane / 4, piece));
                mma_m16n8k32(c[t], a[0], b.x, b.y);
                mma_m16n8k32(c[t], a[1], b.z, b.w);
            }
        }
        if (now.step == steps - 1) {
            products.outputs.store<EPILOGUE, F, Side>(now.tile, c, sums);
#pragma unroll
            for (int t = 0; t < TILES; ++t)
#pragma unroll
                for (int i = 0; i < 4; ++i) c[t][i] = 0;
        }
        now.next();
    }
}

// TILES: tiles of 8 rows of x. F: see expert_activation. k: columns of x that are multiplied, a multiple of 16. n is a
// multiple of 8, or with GATED of 16. Dynamic shared memory: STAGES stages of GROUPED_ROWS + 8 * TILES rows of
// GROUPED_COLUMNS bytes; ExpertTiles.
template <int TILES, int EPILOGUE, int F>
__global__ void __launch_bounds__(GROUPED_THREADS) grouped_gemm(
    const int8* x, const float* x_scale, const int* offsets, const int8* __restrict__ weight, const int* slots,
    const float* __restrict__ w_scale, const float* __restrict__ bias, __half* out, long long out_pitch, int experts,
    int n, int k, int pitch, float limit, float alpha) {
    multiply<TILES, EPILOGUE, F>(
        {x, offsets, weight, slots, {x_scale, w_scale, bias, out, out_pitch, n, {limit, alpha}}, experts, k, pitch},
        NoSide());
}

// The same with what adapters add.
template <int TILES, int EPILOGUE, int F>
__global__ void __launch_bounds__(GROUPED_THREADS) grouped_gemm_adapted(
    const PairSide side, const int8* x, const float* x_scale, const int* offsets, const int8* __restrict__ weight,
    const int* slots, const float* __restrict__ w_scale, const float* __restrict__ bias, __half* out,
    long long out_pitch, int experts, int n, int k, int pitch, float limit, float alpha) {
    multiply<TILES, EPILOGUE, F>(
        {x, offsets, weight, slots, {x_scale, w_scale, bias, out, out_pitch, n, {limit, alpha}}, experts, k, pitch},
        side);
}

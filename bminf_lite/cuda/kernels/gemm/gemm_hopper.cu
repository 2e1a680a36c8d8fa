// int8 GEMM with a fused epilogue for many rows, on compute capability 9.0:
//
//     y = x_scale[row] * (w_scale[channel] * (x @ w.T)) + bias[channel]
//     out = fp16(y) or bf16(y), or out += fp16(y) in fp32 (the residual stream), or out = fp16(f(fp16(y))), or out =
//     fp16(f(fp16(gate)) * fp16(up))
//
// x: int8 [rows, in]; w: int8 [channels, in]; out: [rows, columns]. For a gated layer the first half of the channels is
// the gate, the second half up, and columns = channels / 2; else columns = channels. The int32 sums stay in registers.
//
// The kernel is persistent and warp-specialised: each block computes tiles of BLOCK_M by BLOCK_N one after another.
// One thread loads BLOCK_K columns of both operands per stage by TMA into a pipeline; two warpgroups multiply 64 rows
// each, and scale and round their sums. They write a tile through shared memory by TMA while the tensor cores have the
// first stages of the next one.
//
// There are two kinds of clusters. With CLUSTER == 2 the two blocks have neighbouring row tiles and the same tile of
// the weight: each loads half of it and multicasts that to both, which halves the reads of the weight from L2. With
// SPLIT_K > 1, for products with fewer tiles than SMs, the blocks share one tile: each sums over a part of the columns,
// then they exchange sums, and each finishes a part of the tile.
#include "common/adapters.cuh"
#include "common/async.cuh"
#include "common/bfloat16.cuh"
#include "common/cluster.cuh"
#include "common/common.cuh"
#include "common/wgmma.cuh"
#include "constants/epilogue.cuh"
#include "constants/gemm_hopper.cuh"

namespace bminf {

constexpr int WARPS = 2 * WARPGROUP / WARP;  // that multiply
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
// down a band of `band` row tiles before they go on to the next columns, so that blocks that run at the same time share
// parts of the weight in L2.
template <int COLUMNS, int CLUSTER, int SPLIT_K>
struct TileScheduler {
    int height, row_tiles, column_tiles, band, index;

    __device__ __forceinline__ TileScheduler(int height, int row_tiles, int column_tiles, int band)
        : height(height),
          row_tiles(row_tiles),
          column_tiles(column_tiles),
          band(band),
          index(blockIdx.x / (CLUSTER * SPLIT_K)) {}
    __device__ __forceinline__ bool valid() const { return index < row_tiles * column_tiles; }
    __device__ __forceinline__ void next() { index += gridDim.x / (CLUSTER * SPLIT_K); }
    // (first row, first column) of this block's tile.
    __device__ __forceinline__ int2 origin() const {
        const int first = index / (band * column_tiles) * band, inside = index % (band * column_tiles);
        const int in_band = min(band, row_tiles - first);
        const int tile = (first + inside % in_band) * CLUSTER + (CLUSTER > 1 ? block_rank_in_cluster() : 0);
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

    // side: of both channels, or null.
    __device__ __forceinline__ float2 values(const int* sums, float x_scale, int n, const float* side = nullptr) const {
        float2 y = {
            scaled(__int2float_rn(sums[0]), x_scale, scale[n].x), scaled(__int2float_rn(sums[1]), x_scale, scale[n].y)};
        if (side) y.x = add_side(y.x, side[0]), y.y = add_side(y.y, side[1]);
        if constexpr (BIAS) y.x = __fadd_rn(y.x, bias[n].x), y.y = __fadd_rn(y.y, bias[n].y);
        return y;
    }
};

// The operands of the epilogue. A gated layer's channels of up lie `columns` behind those of the gate.
struct EpilogueScales {
    const float *x_scale, *w_scale, *bias;
    int rows, columns, channels;

    __device__ __forceinline__ float row(int y) const { return y < rows ? x_scale[y] : 0; }

    // Of the groups from `first` on, of a tile of which WIDTH groups lie at `column`.
    template <int WIDTH, int COUNT, bool BIAS>
    __device__ __forceinline__ void load(Channels<COUNT, BIAS>& c, int column, int first) const {
#pragma unroll
        for (int n = 0; n < COUNT; ++n) {
            const int group = first + n, channel = column + group % WIDTH * 8 + threadIdx.x % 4 * 2;
            const int from = min(group < WIDTH ? channel : channel + columns, channels - 2);
            c.scale[n] = *reinterpret_cast<const float2*>(w_scale + from);
            if constexpr (BIAS) c.bias[n] = *reinterpret_cast<const float2*>(bias + from);
        }
    }
    // The same of a tile that lies inside the matrix.
    template <int WIDTH, int COUNT, bool BIAS>
    __device__ __forceinline__ void load_inside(Channels<COUNT, BIAS>& c, int column, int first) const {
        const int own = column + threadIdx.x % 4 * 2 + (first < WIDTH ? 0 : columns);
#pragma unroll
        for (int n = 0; n < COUNT; ++n) {
            c.scale[n] = reinterpret_cast<const float2*>(w_scale + own)[(first + n) % WIDTH * 4];
            if constexpr (BIAS) c.bias[n] = reinterpret_cast<const float2*>(bias + own)[(first + n) % WIDTH * 4];
        }
    }
};

// Words that are loaded while the product is computed, so that what lies around them is in the L1 cache for the
// epilogue.
struct Touched {
    unsigned words = 0;

    __device__ __forceinline__ void add(const void* p) {
        unsigned x;
        asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(x) : "l"(p));
        words ^= x;
    }
    // The scales and biases of a tile of GROUPS groups, of which WIDTH lie at `column`: each thread has one group.
    template <int GROUPS, int WIDTH>
    __device__ __forceinline__ void add_channels(const EpilogueScales& scaling, int column) {
        const int group = threadIdx.x, channel = column + group % WIDTH * 8 + (group < WIDTH ? 0 : scaling.columns);
        if (group >= GROUPS) return;
        add(scaling.w_scale + min(channel, scaling.channels - 1));
        if (scaling.bias) add(scaling.bias + min(channel, scaling.channels - 1));
    }
    // Keeps the compiler from dropping the loads.
    __device__ __forceinline__ void wait() const {
        asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, %0, 0x7fff7fff;\n@p nanosleep.u32 0;\n}" ::"r"(words));
    }
};

// How the side product of a warp's rows with a tile is computed: of any slots; of one; or of one with RANKS ranks,
// where the tile lies inside the matrix, and its gate and its up, or the whole of it, inside a section.
enum class SidePath { SEVERAL, ONE, PLAIN };

// The rows of a warp without a side product.
struct NoSideRows {
    __device__ __forceinline__ NoSideRows(const NoSide&, int, int) {}
    __device__ __forceinline__ void touch(const EpilogueScales&, int) {}
    __device__ __forceinline__ void begin(int, int) {}
};

// The side product of a warp's 16 rows with its GROUPS groups of a tile, BATCH of them at a time, which belong to one
// section. Of a slot that some of the rows have, tensor cores multiply the inputs of all rows by 8 outputs of `up`, and
// a lane gets the sums for the same rows and channels as it has of the product.
//
// The epilogue is bound by its instructions: rows of one slot go on from batch to batch by a pointer, and the usual
// case has a path of its own.
template <int GROUPS, int WIDTH, int BATCH>
struct SideRows {
    static_assert(WIDTH % BATCH == 0, "gate and up have batches of their own");
    static constexpr int NONE = 0xffff;     // the slot of rows that do not exist
    static constexpr int MOST_TOUCHED = 2;  // times RANKS: more of `up` does not stay in the L1 cache
    // This lane's ranks of both of its rows' inputs.
    struct Inputs {
        uint2 low, high;
    };
    template <int COUNT>
    struct UpRows {
        uint2 of[COUNT];
    };
    const SideProduct& side;
    int row, rows;    // this lane's first row, and of all rows
    unsigned own;     // the slots of this lane's two rows
    int first, rank;  // the least slot of the rows, and its rank
    SidePath path;
    int column, columns;
    Touched touched;
    // If there is one slot:
    const __half* up;     // this lane's ranks of the batch that was loaded last; if PLAIN, of the first one
    int section, end;     // the present section, and the group behind it
    Inputs inputs;        // the first ranks for the next batch
    Inputs inputs_of_up;  // if PLAIN
    UpRows<BATCH> ahead;  // of the next batch

    __device__ __forceinline__ SideRows(const SideProduct& side, int row, int rows) : side(side), row(row), rows(rows) {
        own = (row < rows ? side.slots[row] : NONE) | (row + 8 < rows ? side.slots[row + 8] : NONE) << 16;
    }
    __device__ __forceinline__ int slot(int h) const { return h ? own >> 16 : own & 0xffff; }
    __device__ __forceinline__ int slot_behind(int least) const {
        return __reduce_min_sync(FULL, min(slot(0) > least ? slot(0) : NONE, slot(1) > least ? slot(1) : NONE));
    }
    __device__ __forceinline__ int rank_of(int slot) const { return slot == NONE ? 0 : side.rank(slot); }
    // The first output of COUNT groups from `group` on. Beyond the last output they are the last ones.
    template <int COUNT>
    __device__ __forceinline__ int output_of(int group) const {
        return min(column + group % WIDTH * 8 + (group < WIDTH ? 0 : columns), side.outputs - COUNT * 8);
    }
    __device__ __forceinline__ Inputs load_inputs(int section, int at) const {
        return {
            side.input_ranks(min(row, rows - 1), section, at), side.input_ranks(min(row + 8, rows - 1), section, at)};
    }
    template <int COUNT>
    __device__ __forceinline__ static void multiply(
        float (&d)[COUNT][4], const Inputs& inputs, const UpRows<COUNT>& x) {
#pragma unroll
        for (int n = 0; n < COUNT; ++n) mma_ranks(d[n], inputs.low, inputs.high, x.of[n]);
    }
    // Brings a part of what the tile that begins at `column` needs of the scales, of the bias and of `up` to the L1
    // cache, while the product is computed; the block's warps have the other parts, of `up` if their rows have the same
    // slot.
    __device__ __forceinline__ void touch(const EpilogueScales& scaling, int column) {
        this->column = column, columns = scaling.columns;
        touched.add_channels<GROUPS, WIDTH>(scaling, column);
        const int slot = slot_behind(-1), rank = rank_of(slot), sectors = rank / RANKS;
        if (sectors == 0 || sectors > MOST_TOUCHED) return;
        const __half* up = side.up(slot, rank);
#pragma unroll 1
        for (int i = threadIdx.x; i < GROUPS * 8 * sectors; i += WARPS * WARP) {
            const int output = min(output_of<1>(i / sectors / 8) + i / sectors % 8, side.outputs - 1);
            touched.add(up + static_cast<size_t>(output) * rank + i % sectors * RANKS);
        }
    }
    // Loads the operands of the first batch of a tile that begins at `column`; up lies `columns` behind the gate.
    __device__ __forceinline__ void begin(int column, int columns) {
        this->column = column, this->columns = columns;
        touched.wait();
        first = slot_behind(-1);
        path = slot_behind(first) != NONE ? SidePath::SEVERAL : SidePath::ONE;
        rank = rank_of(first);
        if (!rank || path == SidePath::SEVERAL) return;
        up = side.up(first, rank) + (column + threadIdx.x % WARP / 4) * static_cast<size_t>(rank) + threadIdx.x % 4 * 4;
#pragma unroll
        for (int n = 0; n < BATCH; ++n) ahead.of[n] = {};
        load_batch(0, 0);
        enter_section(0);
        if (rank != RANKS || end < WIDTH || column + WIDTH * 8 > columns) return;
        if constexpr (GROUPS > WIDTH) {
            const int output = column + columns, of_up = side.section(output);
            if (side.end(of_up) < output + WIDTH * 8) return;
            inputs_of_up = load_inputs(of_up, 0);
        }
        path = SidePath::PLAIN;
    }
    // The sums of the batch of groups from `group` on, if the path is PLAIN.
    __device__ __forceinline__ void products_of_plain(int group, float (&d)[BATCH][4]) {
        const UpRows<BATCH> x = ahead;
        const int next = group + BATCH;
        if (next < GROUPS) {
            const __half* from = next < WIDTH ? up : up + static_cast<size_t>(columns) * RANKS;
#pragma unroll
            for (int n = 0; n < BATCH; ++n) ahead.of[n] = ld_global_nc_v2(from + (next + n) % WIDTH * 8 * RANKS);
        }
        multiply(d, group < WIDTH ? inputs : inputs_of_up, x);
    }
    // The same if the path is ONE.
    __device__ __forceinline__ void products(int group, float (&d)[BATCH][4]) {
        if (!rank) return;
        UpRows<BATCH> x = ahead;
        Inputs left = inputs;
#pragma unroll 1
        for (int at = RANKS; at < rank; at += RANKS) {
            load_batch(group, at);
            multiply(d, left, x);
            x = ahead, left = load_inputs(section, at);
        }
        const int next = group + BATCH;
        if (next < GROUPS) {
            up += static_cast<size_t>(BATCH * 8) * rank;
            if (next == WIDTH) up += static_cast<size_t>(columns - WIDTH * 8) * rank;
            load_batch(next, 0);
        }
        multiply(d, left, x);
        if (next < GROUPS && (next == WIDTH || next == end)) enter_section(next);
    }
    // The sums of the groups from `group` on, of any slots.
    template <int COUNT>
    __device__ __forceinline__ void products_of_several(int group, float (&found)[COUNT][4]) const {
        const int output = output_of<COUNT>(group), section = side.section(output);
#pragma unroll 1
        for (int now = first; now != NONE; now = slot_behind(now)) {
            const int rank = rank_of(now);
            const __half* up = side.up(now, rank) + (output + threadIdx.x % WARP / 4) * static_cast<size_t>(rank) +
                               threadIdx.x % 4 * 4;
            float d[COUNT][4] = {};
#pragma unroll 1
            for (int at = 0; at < rank; at += RANKS) {
                UpRows<COUNT> x;
#pragma unroll
                for (int n = 0; n < COUNT; ++n) x.of[n] = ld_global_nc_v2(up + at + n * 8 * rank);
                multiply(d, load_inputs(section, at), x);
            }
#pragma unroll
            for (int n = 0; n < COUNT; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (slot(i / 2) == now) found[n][i] = d[n][i];
        }
    }

private:
    // Loads `up` for the batch of groups from `group` on, where it begins, and the ranks from `at` on. Two groups exist
    // together, as sections have multiples of 32 outputs; what a lane has of others is not written.
    __device__ __forceinline__ void load_batch(int group, int at) {
        static_assert(BATCH % 2 == 0);
        const __half* from = up + at;
#pragma unroll
        for (int n = 0; n < BATCH; ++n, from += 8 * rank)
            if ((group + n) / 2 * 2 % WIDTH * 8 < columns - column) ahead.of[n] = ld_global_nc_v2(from);
    }
    // The section of the batch of groups from `group` on begins, or that of up.
    __device__ __forceinline__ void enter_section(int group) {
        const int output = output_of<1>(group);
        section = side.section(output);
        end = group + (side.end(section) - output) / 8;
        inputs = load_inputs(section, 0);
    }
};

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
// which IN_BOX fill a box with rows of BOX_ROW bytes: as many, up to 128, as divide the tile. A piece has EACH groups.
template <int EPILOGUE, int N>
struct TileLayout {
    static constexpr bool GATED = EPILOGUE == Epilogue::GATED, IS_FLOAT = EPILOGUE == ADD || EPILOGUE == TO_FLOAT;
    static constexpr int WIDTH = GATED ? N / 2 : N, GROUP = IS_FLOAT ? 32 : 16, ROW = WIDTH * GROUP;
    static constexpr int BOX_ROW = (ROW & -ROW) < 128 ? (ROW & -ROW) : 128, IN_BOX = BOX_ROW / GROUP;
    static constexpr int EACH = IN_BOX < 4 ? IN_BOX : 4, PIECES = WIDTH / EACH, BOXES = WIDTH / IN_BOX;

    // The place of 16 bytes in a box, with the swizzle of its rows' width.
    __device__ __forceinline__ static unsigned place(int row, int index) {
        const unsigned offset = row * BOX_ROW + index * 16;
        return offset ^ (offset >> 3 & (BOX_ROW - 16));
    }
};

// The scaled sums of a warp's 16 rows, which go to (row, column) of the result: in 16 bits, of a gated layer gate and
// up apart, or in 32 bits for TO_FLOAT. They lie in registers as the sums do.
template <int EPILOGUE, int N, bool HAS_SIDE>
struct ScaledTile {
    using Layout = TileLayout<EPILOGUE, N>;
    // Groups whose scales are loaded together. With a side product they belong to one section.
    static constexpr int BATCH = HAS_SIDE ? (Layout::WIDTH % 4 || N > 24 ? 2 : 4) : N % 8 == 0 ? 8 : N % 4 == 0 ? 4 : 2;
    static constexpr bool IS_WIDE = EPILOGUE == TO_FLOAT;  // too many registers to be kept
    unsigned values[N][IS_WIDE ? 4 : 2];
    int row, column;

    // The values of row h of a group. The statements keep the compiler from delaying the operations, which takes more
    // registers.
    __device__ __forceinline__ void keep(int group, int h, float2 y) {
        unsigned* const v = values[group];
        if constexpr (IS_WIDE) {
            v[2 * h] = __float_as_uint(y.x), v[2 * h + 1] = __float_as_uint(y.y);
            asm volatile("" : "+r"(v[2 * h]), "+r"(v[2 * h + 1]));
        } else {
            v[h] = EPILOGUE == TO_BFLOAT16 ? pack_bfloat162(y.x, y.y) : pack_half2(y.x, y.y);
            asm volatile("" : "+r"(v[h]));
        }
    }

    // next: the operands of the first COUNT groups.
    template <SidePath PATH, int COUNT, bool BIAS, class Rows, class F>
    __device__ __forceinline__ void scale_groups(
        const int (&c)[N][4], const EpilogueScales& scaling, const float (&x_scale)[2], Channels<COUNT, BIAS> next,
        Rows& side, const F& then) {
#pragma unroll
        for (int first = 0; first < N; first += COUNT) {
            const Channels<COUNT, BIAS> channels = next;
            if (first + COUNT < N) {
                if constexpr (PATH == SidePath::PLAIN)
                    scaling.load_inside<Layout::WIDTH>(next, column, first + COUNT);
                else
                    scaling.load<Layout::WIDTH>(next, column, first + COUNT);
            }
            float sums[COUNT][4] = {};
            if constexpr (HAS_SIDE) {
                if constexpr (PATH == SidePath::SEVERAL)
                    side.products_of_several(first, sums);
                else if constexpr (PATH == SidePath::PLAIN)
                    side.products_of_plain(first, sums);
                else
                    side.products(first, sums);
            }
#pragma unroll
            for (int n = 0; n < COUNT; ++n)
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    keep(
                        first + n, h,
                        channels.values(c[first + n] + 2 * h, x_scale[h], n, HAS_SIDE ? sums[n] + 2 * h : nullptr));
            then(first / Layout::EACH, (first + COUNT) / Layout::EACH);
        }
    }

    // next: the operands of the first groups. Calls then(first, end) for pieces whose groups have been scaled.
    template <bool BIAS, class Rows, class F>
    __device__ __forceinline__ void scale(
        const int (&c)[N][4], const EpilogueScales& scaling, const float (&x_scale)[2],
        const Channels<BATCH, BIAS>& next, Rows& side, const F& then) {
        if constexpr (HAS_SIDE) {
            if (side.path == SidePath::PLAIN) {
                scale_groups<SidePath::PLAIN>(c, scaling, x_scale, next, side, then);
                return;
            }
            if (side.path == SidePath::SEVERAL) {
                Channels<2, BIAS> few;
                scaling.load<Layout::WIDTH>(few, column, 0);
                scale_groups<SidePath::SEVERAL>(c, scaling, x_scale, few, side, then);
                return;
            }
        }
        scale_groups<SidePath::ONE>(c, scaling, x_scale, next, side, then);
    }

    // Writes a piece. Called for all pieces in order, which go through two boxes of shared memory at `staging`.
    template <int ACTIVATION>
    __device__ __forceinline__ void write(int piece, const TensorMap& map, unsigned staging) const {
        constexpr int EACH = Layout::EACH, IN_BOX = Layout::IN_BOX;
        const int lane = threadIdx.x % WARP, y = lane / 4, x = lane % 4, first = piece * EACH;
        const unsigned box = staging + first / IN_BOX % 2 * BOX;
        if (first % IN_BOX == 0) {
            // A tile of an odd number of boxes begins in the one that the tile before stored last.
            constexpr int PENDING = Layout::BOXES % 2 ? 0 : 1;
            if (lane == 0) first == 0 ? tma_store_wait<PENDING>() : tma_store_wait<1>();
            __syncwarp();
        }
#pragma unroll
        for (int n = 0; n < EACH; n += 2) {
            unsigned v[2][2];
            const int at = first % IN_BOX + n;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int h = i % 2, m = first + n + i / 2;
                const unsigned place = box + Layout::place(h * 8 + y, (at + i / 2) * 2 + x / 2) + x % 2 * 8;
                if constexpr (IS_WIDE) {
                    st_shared_v2(place, {__uint_as_float(values[m][2 * h]), __uint_as_float(values[m][2 * h + 1])});
                } else if constexpr (EPILOGUE == ADD) {
                    st_shared_v2(place, unpack_half2(values[m][h]));
                } else if constexpr (Layout::GATED) {  // gated(), of values that are rounded
                    const float2 gate = unpack_half2(values[m][h]), up = unpack_half2(values[m + N / 2][h]);
                    v[i / 2][h] = pack_half2(
                        __fmul_rn(activate<ACTIVATION>(gate.x), up.x), __fmul_rn(activate<ACTIVATION>(gate.y), up.y));
                } else if constexpr (EPILOGUE == ACTIVATED) {
                    const float2 y = unpack_half2(values[m][h]);
                    v[i / 2][h] = pack_half2(activate<ACTIVATION>(y.x), activate<ACTIVATION>(y.y));
                } else {
                    v[i / 2][h] = values[m][h];
                }
            }
            if constexpr (!Layout::IS_FLOAT) stmatrix_x4(box + Layout::place(lane % 16, at + lane / 16), v[0], v[1]);
            __syncwarp();  // keeps the compiler from delaying all stores to the end, which would take too many
                           // registers
        }
        if ((first + EACH) % IN_BOX == 0) {
            fence_proxy_async();
            __syncwarp();
            if (lane == 0) tma_store_2d<EPILOGUE>(box, map, column + first / IN_BOX * IN_BOX * 8, row);
        }
    }
};

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

// How tiles are computed, see gemm_hopper.
struct Tiling {
    int stages, height, row_tiles, column_tiles, band;
};

template <int EPILOGUE, int ACTIVATION, bool BIAS, int BLOCK_N, int CLUSTER, int SPLIT_K, class Side>
__device__ __forceinline__ void multiply(
    const EpilogueScales& scaling, const Tiling& tiling, const TensorMap& x_map, const TensorMap& w_map,
    const TensorMap& out_map, const Side& side) {
    static_assert(CLUSTER == 1 || SPLIT_K == 1, "the blocks of a cluster share the weight or a tile");
    constexpr int HALF = BLOCK_N / 2, COLUMNS = EPILOGUE == GATED ? HALF : BLOCK_N, OWN = BLOCK_N / 8 / SPLIT_K;
    const int rows = scaling.rows, columns = scaling.columns, stages = tiling.stages, height = tiling.height;
    extern __shared__ __align__(1024) char shared[];
    const unsigned tiles = cast_smem_ptr_to_uint(shared), staging = tiles + PIPELINE_BYTES;
    Pipeline<BLOCK_N, CLUSTER> pipeline(tiles, staging + WARPS * 2 * BOX);
    if (threadIdx.x == 0) pipeline.init();
    __syncwarp();
    cluster_sync<CLUSTER * SPLIT_K>();
    launch_dependent_grids();
    TileScheduler<COLUMNS, CLUSTER, SPLIT_K> tile(height, tiling.row_tiles, tiling.column_tiles, tiling.band);
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
        const unsigned boxes = staging + warp * 2 * BOX;
        using Result = ScaledTile<EPILOGUE, OWN, Side::EXISTS>;
        using Rows =
            typename Conditional<Side::EXISTS, SideRows<OWN, Result::Layout::WIDTH, Result::BATCH>, NoSideRows>::type;
        constexpr int PIECES = Result::Layout::PIECES;
        Result result;            // of the tile before
        bool is_pending = false;  // whether there is one to be written
        const auto write = [&](int first, int end) {
#pragma unroll
            for (int piece = first; piece < end; ++piece) result.template write<ACTIVATION>(piece, out_map, boxes);
        };
        const auto write_wide = [&](int first, int end) {
            if constexpr (Result::IS_WIDE) write(first, end);
        };
        // A piece is written beside each stage, unless registers do not suffice.
        constexpr bool FITS = !Result::IS_WIDE && !(EPILOGUE == GATED && ACTIVATION == GELU);
        const bool beside = SPLIT_K == 1 && FITS && stages >= PIECES;
        for (;; tile.next()) {
            if (is_pending && !(beside && tile.valid())) write(0, PIECES);
            if (!tile.valid()) break;
            const int2 origin = tile.origin();
            // Rows from `height` on are not loaded. Outside the matrix nothing is written.
            const int row = warp * 16 < height ? origin.x + warp * 16 : rows, mine = row + threadIdx.x % WARP / 4;
            const float scales[2] = {scaling.row(mine), scaling.row(mine + 8)};
            Rows side_rows(side, mine, rows);
            int c[BLOCK_N / 8][4];
            // Starts the products of stage k, then calls `meanwhile`.
            const auto multiply = [&](int k, const auto& meanwhile) {
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
                meanwhile();
            };
            int k = from;
            if (beside)
#pragma unroll
                for (int piece = 0; piece < PIECES; ++piece, ++k)
                    multiply(k, [&] {
                        if (is_pending) write(piece, piece + 1);
                    });
            const int column = origin.y + part * (COLUMNS / SPLIT_K);
            if (beside) side_rows.touch(scaling, column);
#pragma unroll 1
            for (; k < to; ++k) multiply(k, [] {});
            result.row = row, result.column = column;
            Channels<Result::BATCH, BIAS> first;
            scaling.load<Result::Layout::WIDTH>(first, result.column, 0);
            side_rows.begin(result.column, columns);
            wgmma_wait_group<0>();
            warpgroup_fence_operand(c);
            pipeline.release_previous();
            if constexpr (SPLIT_K > 1) {
                int sums[OWN][4];
                exchange_sums<SPLIT_K, EPILOGUE == GATED>(c, sums, tiles);
                result.scale(sums, scaling, scales, first, side_rows, write_wide);
            } else {
                result.scale(c, scaling, scales, first, side_rows, write_wide);
            }
            if constexpr (!FITS && !Result::IS_WIDE) write(0, PIECES);
            is_pending = FITS;
        }
        if (threadIdx.x % WARP == 0) tma_store_wait<0>();
        __syncwarp();
    }
    if constexpr (CLUSTER > 1) cluster_sync<CLUSTER>();  // other blocks write to this block's shared memory
}

// ACTIVATION: the function of GATED and ACTIVATED. BLOCK_N: channels of a tile, 128, 160, 192, 224 or 256, or with
// SPLIT_K 64, 96 or 128. Boxes of the tensor maps: x_map `height` rows of 128 columns; w_map BLOCK_N / 2 rows of 128
// columns; out_map 16 rows of BOX_ROW bytes. `height`: rows of a tile that are computed, a multiple of 16. `stages`
// stages cover a row of x. CLUSTER: 1 or 2; row_tiles, column_tiles and `band`, see TileScheduler, count the tiles of a
// cluster (CLUSTER * height rows). SPLIT_K: with it CLUSTER is 1, there is one cluster for each tile, and stages >=
// SPLIT_K. Dynamic shared memory: PIPELINE_BYTES; two boxes for each multiplying warp; 16 bytes for each stage of the
// pipeline.
template <int EPILOGUE, int ACTIVATION, bool BIAS, int BLOCK_N, int CLUSTER, int SPLIT_K>
__global__ void __launch_bounds__(3 * WARPGROUP, 1) gemm_hopper(
    const float* x_scale, const float* w_scale, const float* bias, int rows, int columns, int channels, int stages,
    int height, int row_tiles, int column_tiles, int band, const __grid_constant__ TensorMap x_map,
    const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap out_map) {
    multiply<EPILOGUE, ACTIVATION, BIAS, BLOCK_N, CLUSTER, SPLIT_K>(
        {x_scale, w_scale, bias, rows, columns, channels}, {stages, height, row_tiles, column_tiles, band}, x_map,
        w_map, out_map, NoSide());
}

// The same with a side product. The sections of its weight end at multiples of 32 channels.
template <int EPILOGUE, int ACTIVATION, bool BIAS, int BLOCK_N, int CLUSTER, int SPLIT_K>
__global__ void __launch_bounds__(3 * WARPGROUP, 1) gemm_hopper_adapted(
    const SideProduct side, const float* x_scale, const float* w_scale, const float* bias, int rows, int columns,
    int channels, int stages, int height, int row_tiles, int column_tiles, int band,
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
    const __grid_constant__ TensorMap out_map) {
    multiply<EPILOGUE, ACTIVATION, BIAS, BLOCK_N, CLUSTER, SPLIT_K>(
        {x_scale, w_scale, bias, rows, columns, channels}, {stages, height, row_tiles, column_tiles, band}, x_map,
        w_map, out_map, side);
}

}  // namespace bminf

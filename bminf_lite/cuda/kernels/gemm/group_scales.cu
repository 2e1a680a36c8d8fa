// int8 products of a weight, or of an input, with a scale for each group of columns, by mma.sync:
//
//     y = sum over the groups g, in order, of x_scale[g, row] * (w_scale[g, channel] * (x @ w.T over the columns of g))
//     out = epilogue(y + bias[channel])
//
// x: int8 [rows, pitch]; weight: int8 [n, pitch]; x_scale: fp32, x_stride elements from group to group, or x_stride = 0
// if a row has one scale; w_scale: likewise; bias: fp32 [n] or null; out: [rows, n], or [rows, n / 2] of a gated layer.
// A group has `group` columns, a multiple of STEP. Sums over a group are exact; the sum over groups has one order.
//
// The weight is the left operand of the instruction, 16 channels at a time, and the activations are the right operand,
// in tiles of 8 rows. The order of k within STEP columns is arbitrary as long as both operands agree: each lane reads
// STEP / 4 contiguous bytes of a row. With GATED the 16 channels are 8 of the gate and those of up that belong to them.
//
//     group_scales_few   up to 32 rows: a block computes 16 channels, and its warps take the groups in turn
//     group_scales_many  any rows: a block computes CHANNELS channels of ROWS rows, and goes from group to group
#include "common/async.cuh"
#include "common/common.cuh"
#include "common/epilogue.cuh"
#include "common/tensor_cores.cuh"
#include "constants/group_scales.cuh"

using namespace bminf;

constexpr int WARPS = THREADS / WARP;
constexpr int M = 16;            // channels of an instruction
constexpr float NO_SUM = -0.0f;  // -0 + y is y, of either zero too

// STEP columns of a row, as far as one lane has them.
template <int STEP>
using Piece = typename Conditional<STEP == 64, int4, int2>::type;

// c += the products of STEP columns: those of the channels lane / 4 and lane / 4 + 8, and of row lane / 4.
template <int STEP>
__device__ __forceinline__ void
multiply(int (&c)[4], const Piece<STEP>& low, const Piece<STEP>& high, const Piece<STEP>& x) {
    const int first[4] = {low.x, high.x, low.y, high.y};
    mma_m16n8k32(c, first, x.x, x.y);
    if constexpr (STEP == 64) {
        const int second[4] = {low.z, high.z, low.w, high.w};
        mma_m16n8k32(c, second, x.z, x.w);
    }
}

// The outputs of a block: `count` of them from `first` on. A row of its tile is a channel of the weight.
template <int EPILOGUE, int TILE>
struct TileOutputs {
    static constexpr int MATRICES = EPILOGUE == GATED ? 2 : 1;
    int n, first, count;

    __device__ __forceinline__ TileOutputs(int n, int tile) : n(n), first(tile * (TILE / MATRICES)) {
        count = min(TILE / MATRICES, n / MATRICES - first);
    }
    // The output of a row of the tile, counted from the first.
    __device__ __forceinline__ static int output(int row) { return MATRICES == 2 ? row / M * 8 + row % 8 : row; }
    // The row of the tile with an output's value, or with that of its gate.
    __device__ __forceinline__ static int row(int output) {
        return MATRICES == 2 ? output / 8 * M + output % 8 : output;
    }
    // The channel of a row of the tile; of the last output behind the end.
    __device__ __forceinline__ int channel(int row) const {
        const int up = MATRICES == 2 && row % M >= 8 ? n / 2 : 0;
        return up + first + min(output(row), count - 1);
    }
    // Writes the outputs of `rows` rows from `row0` on. sums: [rows, stride], the tile's rows of each.
    template <int F>
    __device__ __forceinline__ void
    store(const float* sums, int stride, int row0, int rows, const float* bias, void* out, long long pitch) const {
        for (int i = threadIdx.x; i < rows * count; i += THREADS) {
            const int token = i / count, output = i % count;
            float y[MATRICES];
#pragma unroll
            for (int m = 0; m < MATRICES; ++m) {
                y[m] = sums[token * stride + row(output) + m * 8];
                if (bias) y[m] = __fadd_rn(y[m], bias[first + output + m * (n / 2)]);
            }
            const size_t index = (row0 + token) * pitch + first + output;
            const float residual = EPILOGUE == ADD ? static_cast<const float*>(out)[index] : 0.0f;
            store_output<EPILOGUE, F>(out, index, y[0], y[MATRICES - 1], residual);
        }
    }
};

// The scales of channels.
struct Scales {
    const float* values;
    long long stride;

    __device__ __forceinline__ float at(int group, int index) const { return values[group * stride + index]; }
};

// The columns of a group that a lane reads in pieces, two at a time: the loads of both are in flight together.
template <int TILES, int STEP>
struct FewOperands {
    Piece<STEP> low[2], high[2], x[2][TILES];

    // Columns from `column` on, relative to the addresses; none from `end` on. __ldcg bypasses L1, which is not coherent
    // with writes since the launch of this kernel.
    __device__ __forceinline__ void
    load(const int8* channel, long long eighth, const int8* const (&rows)[TILES], int column, int end) {
#pragma unroll
        for (int u = 0; u < 2; ++u) {
            const bool valid = column + u * STEP < end;
            low[u] = valid ? __ldcs(at(channel + column + u * STEP)) : Piece<STEP>{};
            high[u] = valid ? __ldcs(at(channel + eighth + column + u * STEP)) : Piece<STEP>{};
#pragma unroll
            for (int t = 0; t < TILES; ++t)
                x[u][t] = valid && rows[t] ? __ldcg(at(rows[t] + column + u * STEP)) : Piece<STEP>{};
        }
    }
    __device__ __forceinline__ static const Piece<STEP>* at(const int8* p) {
        return reinterpret_cast<const Piece<STEP>*>(p);
    }
};

// TILES: tiles of 8 rows. F: the function of GATED and ACTIVATED. The grid has a block for each 16 channels.
template <int TILES, int STEP, int EPILOGUE, int F>
__global__ void __launch_bounds__(THREADS) group_scales_few(
    const int8* x, const float* x_scale, long long x_stride, const int8* __restrict__ weight,
    const float* __restrict__ w_scale, long long w_stride, const float* __restrict__ bias, void* out,
    long long out_pitch, int rows, int n, int pitch, int group, int groups) {
    constexpr int OUTPUTS = TILES * 8 * M, STRIDE = M + 1;
    __shared__ float terms[2][WARPS][OUTPUTS];
    launch_dependent_grids();
    const TileOutputs<EPILOGUE, M> outputs(n, blockIdx.x);
    const int warp = warp_index(), lane = threadIdx.x % WARP, offset = lane % 4 * (STEP / 4);
    const int channels[2] = {outputs.channel(lane / 4), outputs.channel(lane / 4 + 8)};
    const int8* const channel = weight + static_cast<size_t>(channels[0]) * pitch + offset;
    const long long eighth = static_cast<long long>(channels[1] - channels[0]) * pitch;
    wait_on_dependent_grids();
    const int8* x_rows[TILES];
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
        const int row = t * 8 + lane / 4;
        x_rows[t] = row < rows ? x + static_cast<size_t>(row) * pitch + offset : nullptr;
    }
    const Scales of_channels = {w_scale, w_stride};
    constexpr int OWN = (OUTPUTS + THREADS - 1) / THREADS;  // sums of a thread
    float sums[OWN];
#pragma unroll
    for (int i = 0; i < OWN; ++i) sums[i] = NO_SUM;
    for (int first = 0; first < groups; first += WARPS) {
        float (&round)[WARPS][OUTPUTS] = terms[first / WARPS % 2];
        if (const int g = first + warp; g < groups) {
            const float scale[2] = {of_channels.at(g, channels[0]), of_channels.at(g, channels[1])};
            int c[TILES][4] = {};
            for (int column = g * group; column < (g + 1) * group; column += 2 * STEP) {
                FewOperands<TILES, STEP> operands;
                operands.load(channel, eighth, x_rows, column, (g + 1) * group);
#pragma unroll
                for (int u = 0; u < 2; ++u)
#pragma unroll
                    for (int t = 0; t < TILES; ++t)
                        multiply<STEP>(c[t], operands.low[u], operands.high[u], operands.x[u][t]);
            }
#pragma unroll
            for (int t = 0; t < TILES; ++t)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int row = t * 8 + lane % 4 * 2 + i % 2;
                    const float factor = row < rows ? __ldcg(x_scale + g * x_stride + row) : 0.0f;
                    round[warp][(t * 4 + i) * WARP + lane] = scaled(__int2float_rn(c[t][i]), factor, scale[i / 2]);
                }
        }
        __syncthreads();
        const int count = min(WARPS, groups - first);
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const int output = i * THREADS + threadIdx.x;
            if (output >= OUTPUTS) continue;
            for (int w = 0; w < count; ++w) sums[i] = __fadd_rn(sums[i], round[w][output]);
        }
    }
    __syncthreads();
    float* const tile = &terms[0][0][0];  // [rows, STRIDE]
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const int output = i * THREADS + threadIdx.x, l = output % WARP, part = output / WARP % 4;
        if (output < OUTPUTS)
            tile[(output / (4 * WARP) * 8 + l % 4 * 2 + part % 2) * STRIDE + l / 4 + part / 2 * 8] = sums[i];
    }
    __syncthreads();
    outputs.template store<F>(tile, STRIDE, 0, rows, bias, out, out_pitch);
}

constexpr int STAGES = PIPELINE_STAGES;
constexpr int PIECES = COLUMNS / 16;  // of 16 bytes in a row of a stage
constexpr int TILES = ROWS / 8;
constexpr int STAGE = (CHANNELS + ROWS) * COLUMNS;
static_assert(CHANNELS == WARPS * M && THREADS % PIECES == 0);

// The place of a byte of a stage. Of eight lanes that read two rows at the same time, each has banks of its own.
__device__ __forceinline__ int place(int row, int column) {
    return row * COLUMNS + ((column / 16) ^ (row % 2 * 4)) * 16 + column % 16;
}

// The grid is (tiles of rows, tiles of channels). Dynamic shared memory: STAGES stages of CHANNELS + ROWS rows of COLUMNS
// bytes, or ROWS rows of CHANNELS + 4 floats if these are more.
template <int STEP, int EPILOGUE, int F>
__global__ void __launch_bounds__(THREADS) group_scales_many(
    const int8* x, const float* x_scale, long long x_stride, const int8* __restrict__ weight,
    const float* __restrict__ w_scale, long long w_stride, const float* __restrict__ bias, void* out,
    long long out_pitch, int rows, int n, int pitch, int group, int groups) {
    extern __shared__ __align__(128) char shared[];
    launch_dependent_grids();
    const TileOutputs<EPILOGUE, CHANNELS> outputs(n, blockIdx.y);
    const int warp = warp_index(), lane = threadIdx.x % WARP, row0 = blockIdx.x * ROWS, end = groups * group;
    const int tile_rows = min(ROWS, rows - row0), stages = (end + COLUMNS - 1) / COLUMNS;
    wait_on_dependent_grids();

    const auto load = [&](int step) {
        if (step < stages) {
            const unsigned target = cast_smem_ptr_to_uint(shared + step % STAGES * STAGE);
            const int column = threadIdx.x % PIECES * 16, from = step * COLUMNS + column;
            const bool valid = from < end;
            const int source = valid ? from : 0;  // an address that exists
#pragma unroll
            for (int row = threadIdx.x / PIECES; row < CHANNELS; row += THREADS / PIECES)
                cp_async_16(
                    target + place(row, column), weight + static_cast<size_t>(outputs.channel(row)) * pitch + source,
                    valid);
#pragma unroll
            for (int row = threadIdx.x / PIECES; row < ROWS; row += THREADS / PIECES)
                cp_async_16(
                    target + place(CHANNELS + row, column),
                    x + static_cast<size_t>(row0 + min(row, tile_rows - 1)) * pitch + source, valid);
        }
        cp_async_commit_group();
    };

    for (int i = 0; i < STAGES - 1; ++i) load(i);
    const Scales of_channels = {w_scale, w_stride};
    const int channels[2] = {outputs.channel(warp * M + lane / 4), outputs.channel(warp * M + lane / 4 + 8)};
    float scale[2] = {of_channels.at(0, channels[0]), of_channels.at(0, channels[1])};
    int c[TILES][4] = {};
    float sums[TILES][4];
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[t][i] = NO_SUM;
    int g = 0, left = group / STEP;  // the group, and the steps to its end
    for (int step = 0; step < stages; ++step) {
        cp_async_wait_group<STAGES - 2>();
        __syncthreads();
        load(step + STAGES - 1);
        const char* const from = shared + step % STAGES * STAGE;
        const auto piece = [&](int row, int part) {
            return *reinterpret_cast<const Piece<STEP>*>(from + place(row, part * STEP + lane % 4 * (STEP / 4)));
        };
        for (int part = 0; part < COLUMNS / STEP && g < groups; ++part) {
            const auto low = piece(warp * M + lane / 4, part), high = piece(warp * M + lane / 4 + 8, part);
#pragma unroll
            for (int t = 0; t < TILES; ++t)
                multiply<STEP>(c[t], low, high, piece(CHANNELS + t * 8 + lane / 4, part));
            if (--left) continue;
#pragma unroll
            for (int t = 0; t < TILES; ++t)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int row = t * 8 + lane % 4 * 2 + i % 2;
                    const float factor = row < tile_rows ? __ldcg(x_scale + g * x_stride + row0 + row) : 0.0f;
                    const float term = scaled(__int2float_rn(c[t][i]), factor, scale[i / 2]);
                    sums[t][i] = __fadd_rn(sums[t][i], term);
                    c[t][i] = 0;
                }
            left = group / STEP;
            if (++g < groups)
#pragma unroll
                for (int m = 0; m < 2; ++m) scale[m] = of_channels.at(g, channels[m]);
        }
    }
    cp_async_wait_all();
    __syncthreads();
    constexpr int STRIDE = CHANNELS + 4;
    float* const tile = reinterpret_cast<float*>(shared);  // [ROWS, STRIDE]
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            tile[(t * 8 + lane % 4 * 2 + i % 2) * STRIDE + warp * M + lane / 4 + i / 2 * 8] = sums[t][i];
    __syncthreads();
    outputs.template store<F>(tile, STRIDE, row0, tile_rows, bias, out, out_pitch);
}

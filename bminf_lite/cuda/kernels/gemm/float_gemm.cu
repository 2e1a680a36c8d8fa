// Products with float activations for any number of rows by mma.sync, from compute capability 7.5 on.
//
//     out = epilogue(w_scale * (x @ w.T) + bias), see float_gemm.cuh
//
// x: fp16 [rows, x_pitch]; w: fp16 or int8 [n, pitch]; w_scale: fp32 [n], or fp16 or fp32 [groups, scale_pitch] with a
// scale for GROUP columns; bias: fp32 [n]; out: [rows, out_pitch], of n columns, or n / 2 of a gated layer.
//
// The weight is the left operand of mma.m16n8k16 and the rows of x are the right one. Each block computes one tile; its
// warps share a pipeline of stages of BLOCKS * BLOCK columns of both operands, filled by cp.async. A warp loads the
// fragments of the next step while it multiplies those of one. Of a gated layer, 8 channels of the gate and 8 of up are
// 16 rows of a tile, so that one thread has both sums of an output.
#include "common/async.cuh"
#include "common/common.cuh"
#include "common/tensor_cores.cuh"
#include "gemm/float_gemm.cuh"

using namespace bminf;

// The shape of a tile: WARPS_M * MT * 16 channels, WARPS_N * NT * 8 rows; each warp has MT * 16 by NT * 8 of it.
template <class W, int WARPS_M, int WARPS_N, int MT, int NT, int BLOCKS>
struct Tile {
    static constexpr int THREADS = WARPS_M * WARPS_N * WARP, CHANNELS = WARPS_M * MT * 16, ROWS = WARPS_N * NT * 8;
    static constexpr int W_ROW = BLOCK * sizeof(W), X_ROW = BLOCK * 2;  // bytes of a row of a block
    static constexpr int W_BYTES = CHANNELS * W_ROW, X_BYTES = ROWS * X_ROW, BYTES = BLOCKS * (W_BYTES + X_BYTES);

    // The place of 16 bytes of a row, which keeps the accesses of eight neighbouring rows apart.
    __device__ __forceinline__ static int w_place(int row, int piece) {
        return row * W_ROW + ((sizeof(W) == 1 ? piece ^ row / 2 % 4 : piece ^ row % 8) << 4);
    }
    __device__ __forceinline__ static int x_place(int row, int piece) { return row * X_ROW + ((piece ^ row % 8) << 4); }
};

// The row of the weight that is row `row` of all tiles: of a gated layer 8 rows of the gate and 8 of up by turns.
template <bool IS_GATED>
__device__ __forceinline__ int weight_row(int row, int outputs) {
    return IS_GATED ? row / 16 * 8 + row % 8 + (row % 16 < 8 ? 0 : outputs) : row;
}

// The pieces of 16 bytes that a thread copies of an operand for each block of 64 columns: one of every STRIDE-th row.
template <int ROWS, int ROW_BYTES, int THREADS>
struct Pieces {
    static constexpr int IN_ROW = ROW_BYTES / 16, STRIDE = THREADS / IN_ROW, COUNT = (ROWS + STRIDE - 1) / STRIDE;
    const char* sources[COUNT];  // null: zeros
    int row, piece;

    // source_of(row): the start of a row of the tile, or null outside of the matrix.
    template <class F>
    __device__ __forceinline__ explicit Pieces(const F& source_of) {
        row = threadIdx.x / IN_ROW, piece = threadIdx.x % IN_ROW;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const void* source = row + i * STRIDE < ROWS ? source_of(row + i * STRIDE) : nullptr;
            sources[i] = source ? static_cast<const char*>(source) + piece * 16 : nullptr;
        }
    }
    // Starts to copy the pieces from byte `first` of the rows on to place(row, piece), with zeros behind byte `end`.
    template <class F>
    __device__ __forceinline__ void copy(int first, int end, const void* valid, const F& place) const {
        const int bytes = min(max(end - first - piece * 16, 0), 16);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            if (row + i * STRIDE >= ROWS) break;
            const bool inside = sources[i] && bytes > 0;
            cp_async_16_partial(
                place(row + i * STRIDE, piece), inside ? sources[i] + first : static_cast<const char*>(valid),
                inside ? bytes : 0);
        }
    }
};

// The fragments of a step: of a warp's MT tiles of 16 channels and NT tiles of 8 rows.
template <class T, class W, int MT, int NT>
struct Fragments {
    unsigned a[MT][4], b[NT][2];

    // w, x: shared addresses of the block of 64 columns; channel, row: the warp's first ones; step: of the block.
    __device__ __forceinline__ void load(unsigned w, unsigned x, int channel, int row, int step) {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int t = 0; t < MT; ++t) {
            if constexpr (sizeof(W) == 1) {
                const unsigned low = w + T::w_place(channel + t * 16 + lane / 4, step) + lane % 4 * 2;
                const unsigned high = w + T::w_place(channel + t * 16 + lane / 4 + 8, step) + lane % 4 * 2;
                halves_of_codes(two_codes(low, high), a[t][0], a[t][1]);
                halves_of_codes(two_codes(low + 8, high + 8), a[t][2], a[t][3]);
            } else {
                ldmatrix_x4(a[t], w + T::w_place(channel + t * 16 + lane % 16, step * 2 + lane / 16));
            }
        }
#pragma unroll
        for (int j = 0; j < NT; j += 2) {
            const int tile = NT == 1 ? 0 : j + lane / 16;
            unsigned both[4];
            ldmatrix_x4(both, x + T::x_place(row + tile * 8 + lane % 8, step * 2 + lane / 8 % 2));
            b[j][0] = both[0], b[j][1] = both[1];
            if constexpr (NT > 1) b[j + 1][0] = both[2], b[j + 1][1] = both[3];
        }
    }
};

// GROUP: columns of a scale, of type S; 0: each channel has one. Tiles: see Tile; STAGES of the pipeline. F: the
// function of GATED and ACTIVATED. The grid is (tiles of rows, tiles of channels). Dynamic shared memory: the stages.
template <
    class W, int GROUP, class S, int WARPS_M, int WARPS_N, int MT, int NT, int BLOCKS, int STAGES, int EPILOGUE, int F>
__global__ void __launch_bounds__(WARPS_M * WARPS_N * WARP) float_gemm(
    const __half* x, long long x_pitch, const void* w, int pitch, const void* w_scale, int scale_pitch,
    const float* bias, void* out, long long out_pitch, int rows, int n, int k) {
    using T = Tile<W, WARPS_M, WARPS_N, MT, NT, BLOCKS>;
    constexpr bool IS_GATED = EPILOGUE == GATED, FROM_CODES = sizeof(W) == 1, SCALED = FROM_CODES && GROUP == 0;
    constexpr int STEPS = BLOCK / STEP;
    extern __shared__ __align__(128) char shared[];
    launch_dependent_grids();
    const unsigned stages = cast_smem_ptr_to_uint(shared);
    const int outputs = IS_GATED ? n / 2 : n;
    const int first_row = blockIdx.x * T::ROWS, first_channel = blockIdx.y * T::CHANNELS;
    const int steps = (k + BLOCKS * BLOCK - 1) / (BLOCKS * BLOCK), warp = threadIdx.x / WARP;
    const int lane = threadIdx.x % WARP, r = lane / 4, l = lane % 4;
    const int own_channel = warp / WARPS_N * (MT * 16), own_row = warp % WARPS_N * (NT * 8);
    const Pieces<T::CHANNELS, T::W_ROW, T::THREADS> w_pieces([&](int row) -> const void* {
        const int from = weight_row<IS_GATED>(first_channel + row, outputs);
        return from < n ? static_cast<const W*>(w) + static_cast<size_t>(from) * pitch : nullptr;
    });
    const Pieces<T::ROWS, T::X_ROW, T::THREADS> x_pieces(
        [&](int row) -> const void* { return first_row + row < rows ? x + (first_row + row) * x_pitch : nullptr; });
    const auto load = [&](int step) {
        if (step < steps)
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b) {
                const int column = (step * BLOCKS + b) * BLOCK;
                const unsigned w_block = stages + step % STAGES * T::BYTES + b * (T::W_BYTES + T::X_BYTES);
                w_pieces.copy(column * sizeof(W), pitch * sizeof(W), w, [&](int row, int piece) {
                    return w_block + T::w_place(row, piece);
                });
                x_pieces.copy(column * 2, k * 2, x, [&](int row, int piece) {
                    return w_block + T::W_BYTES + T::x_place(row, piece);
                });
            }
        cp_async_commit_group();
    };
    wait_on_dependent_grids();
    for (int i = 0; i < STAGES - 1; ++i) load(i);
    float c[MT][NT][4] = {}, sum[GROUP ? MT : 1][GROUP ? NT : 1][4] = {};
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        cp_async_wait_group<STAGES - 2>();
        __syncthreads();
        load(step + STAGES - 1);
        const unsigned stage = stages + step % STAGES * T::BYTES;
        Fragments<T, W, MT, NT> fragments[2];
        const auto load_fragments = [&](int i) {
            const unsigned w_block = stage + i / STEPS * (T::W_BYTES + T::X_BYTES);
            fragments[i % 2].load(w_block, w_block + T::W_BYTES, own_channel, own_row, i % STEPS);
        };
        load_fragments(0);
#pragma unroll
        for (int i = 0; i < BLOCKS * STEPS; ++i) {
            if (i + 1 < BLOCKS * STEPS) load_fragments(i + 1);
            const auto& of_step = fragments[i % 2];
#pragma unroll
            for (int j = 0; j < NT; ++j)
#pragma unroll
                for (int t = 0; t < MT; ++t) mma_m16n8k16(c[t][j], of_step.a[t], of_step.b[j][0], of_step.b[j][1]);
            if constexpr (GROUP > 0) {
                const int end = step * (BLOCKS * BLOCK) + (i + 1) * STEP;
                const bool ends = end % GROUP == 0 || (step + 1 == steps && i + 1 == BLOCKS * STEPS);
                const int group = (end - 1) / GROUP;
                if (!ends || group * GROUP >= k) continue;
#pragma unroll
                for (int t = 0; t < MT; ++t)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const int row = first_channel + own_channel + t * 16 + h * 8 + r;
                        const int channel = weight_row<IS_GATED>(row, outputs);
                        const size_t at = static_cast<size_t>(group) * scale_pitch + channel;
                        const float scale = channel < n ? to_float(static_cast<const S*>(w_scale)[at]) : 0.0f;
#pragma unroll
                        for (int j = 0; j < NT; ++j)
#pragma unroll
                            for (int q = 2 * h; q < 2 * h + 2; ++q)
                                sum[t][j][q] = add_group(sum[t][j][q], scale, c[t][j][q]), c[t][j][q] = 0;
                    }
            }
        }
    }
#pragma unroll
    for (int t = 0; t < MT; ++t) {
        ChannelOperands channels[2];
        int output[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = first_channel + own_channel + t * 16 + h * 8 + r, at = weight_row<IS_GATED>(row, outputs);
            output[h] = IS_GATED ? row / 16 * 8 + r : row;
            const bool inside = output[h] < outputs;
            channels[h].scale = SCALED && inside ? static_cast<const float*>(w_scale)[at] : 0.0f;
            channels[h].bias = bias && inside ? bias[at] : 0.0f;
        }
#pragma unroll
        for (int j = 0; j < NT; ++j)
#pragma unroll
            for (int q = 0; q < (IS_GATED ? 2 : 4); ++q) {
                const int row = first_row + own_row + j * 8 + l * 2 + q % 2, at = output[q / 2];
                if (row >= rows || at >= outputs) continue;
                const auto value = [&](int q) {
                    const float total = GROUP ? sum[GROUP ? t : 0][GROUP ? j : 0][q] : c[t][j][q];
                    return output_value<SCALED>(total, channels[q / 2], bias != nullptr);
                };
                const size_t index = row * out_pitch + at;
                const float up = IS_GATED ? value(q % 2 + 2) : 0.0f;
                const float residual = EPILOGUE == ADD ? static_cast<const float*>(out)[index] : 0.0f;
                store_output<EPILOGUE, F>(out, index, value(q), up, residual);
            }
    }
}

// Products of each head's part of some rows with the head's own matrix, on the tensor cores:
//
//     out[t, h] = fp16(factors[t] * (x[t, h] @ w[h]))
//
// x: fp16, rows x_pitch apart; head h of a row has k elements, x_head behind those of head h - 1; out: fp16, the same
// with out_pitch, n and out_head. w: fp16, rows w_pitch apart; the rows of head h begin with h * w_rows: k rows of n
// elements if BY_INPUT, else n rows of k elements, padded with zeros. factors: fp32 [T], or null for ones. Each element
// of the result is one chain of k16 steps from zero, so it has the same bits for any number of tokens.
//
// A block has TOKENS tokens and COLUMNS columns of one head. w is aligned to 16 bytes, and w_pitch is a multiple of 8.
// `aligned`: the heads of x are aligned to 16 bytes too.
#pragma once
#include "common/async.cuh"
#include "common/tensor_cores.cuh"
#include "constants/head_products.cuh"

namespace bminf {

constexpr int PITCH = (CHUNK + 8) * 2;  // bytes of a row in shared memory

// Blocks of few tokens wait for memory, so they have more chunks in flight: STAGES - 1.
template <int TOKENS, int STAGES>
struct HeadProductsScratch {
    __align__(16) char inputs[STAGES][TOKENS * PITCH];
    __align__(16) char weights[STAGES][COLUMNS * PITCH];
};

// The matrix of a head: rows w_pitch apart, k of n elements if BY_INPUT, else n of k.
template <bool BY_INPUT>
struct HeadMatrix {
    const __half* rows;
    int pitch, k, n;

    // Starts to load a chunk: elements of the sums from `from` on, for the columns from first_column on.
    __device__ __forceinline__ void load(char* chunk, int from, int first_column) const {
        const unsigned target = cast_smem_ptr_to_uint(chunk);
        const int first_row = BY_INPUT ? from : first_column, end_row = BY_INPUT ? k : n;
        const int left = BY_INPUT ? first_column : from;
        for (int i = threadIdx.x; i < CHUNK * (CHUNK / 8); i += THREADS) {
            const int row = i / (CHUNK / 8), piece = i % (CHUNK / 8) * 8;
            const bool is_there = first_row + row < end_row && left + piece < pitch;
            cp_async_16(
                target + row * PITCH + piece * 2,
                is_there ? rows + static_cast<long long>(first_row + row) * pitch + left + piece : rows, is_there);
        }
    }
};

// The sums of a warp: GROUPS groups of 16 tokens, and WIDTH columns.
template <int GROUPS, bool BY_INPUT>
struct HeadSums {
    static constexpr int WIDTH = COLUMNS / (THREADS / WARP);
    static_assert(WIDTH == 16, "two tiles of a warp");
    static_assert(COLUMNS == CHUNK, "a chunk of w is square, so it fits either way");
    float sums[GROUPS][2][4] = {};
    int lane = threadIdx.x % WARP, column = threadIdx.x / WARP * WIDTH;

    // Adds the products of a chunk.
    __device__ __forceinline__ void add(const char* inputs, const char* weights) {
        const unsigned a_row = cast_smem_ptr_to_uint(inputs) + lane % 16 * PITCH + lane / 16 * 16;
        const unsigned b_row = cast_smem_ptr_to_uint(weights) +
                               (BY_INPUT ? lane % 16 * PITCH + lane / 16 * 16 + column * 2
                                         : (column + lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * 16);
#pragma unroll
        for (int step = 0; step < CHUNK / 16; ++step) {
            unsigned b[4];
            if constexpr (BY_INPUT)
                ldmatrix_x4_trans(b, b_row + step * 16 * PITCH);
            else
                ldmatrix_x4(b, b_row + step * 32);
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
                unsigned a[4];
                ldmatrix_x4(a, a_row + group * 16 * PITCH + step * 32);
                mma_m16n8k16(sums[group][0], a, b[0], b[1]);
                mma_m16n8k16(sums[group][1], a, b[2], b[3]);
            }
        }
    }

    // Stores the rows of tokens from first_token on, and the columns from first_column on. out: of the head.
    __device__ __forceinline__ void store(
        int first_token, int tokens, int first_column, int n, const float* factors, __half* out,
        long long out_pitch) const {
#pragma unroll
        for (int group = 0; group < GROUPS; ++group)
#pragma unroll
            for (int high = 0; high < 2; ++high) {
                const int token = first_token + group * 16 + lane / 4 + high * 8;
                if (token >= tokens) continue;
                const float factor = factors ? factors[token] : 1.0f;
                __half* const row = out + token * out_pitch;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int at = first_column + column + i / 2 * 8 + lane % 4 * 2 + i % 2;
                    if (at < n) row[at] = __float2half_rn(__fmul_rn(sums[group][i / 2][2 * high + i % 2], factor));
                }
            }
    }
};

// One block's part. It waits for earlier kernels. Called by THREADS threads.
template <int TOKENS, int STAGES, bool BY_INPUT>
__device__ __forceinline__ void multiply_head(
    HeadProductsScratch<TOKENS, STAGES>& scratch, int token_block, int column_block, int head, const __half* x,
    long long x_pitch, int x_head, int aligned, const __half* w, int w_pitch, int w_rows, int k, int n,
    const float* factors, __half* out, long long out_pitch, int out_head, int tokens) {
    const int first_token = token_block * TOKENS, first_column = column_block * COLUMNS;
    const HeadMatrix<BY_INPUT> matrix = {w + static_cast<long long>(head) * w_rows * w_pitch, w_pitch, k, n};
    x += static_cast<long long>(head) * x_head;
    const auto load_inputs = [&](int stage, int from) {
        const unsigned target = cast_smem_ptr_to_uint(scratch.inputs[stage]);
        for (int i = threadIdx.x; i < TOKENS * (CHUNK / 8); i += THREADS) {
            const int row = i / (CHUNK / 8), piece = i % (CHUNK / 8) * 8;
            const int count = first_token + row < tokens ? max(0, min(8, k - from - piece)) : 0;
            const unsigned place = target + row * PITCH + piece * 2;
            const __half* const origin = count ? x + (first_token + row) * x_pitch + from + piece : x;
            if (aligned) {
                cp_async_16_partial(place, origin, 2 * count);
            } else {
#pragma unroll
                for (int j = 0; j < 8; ++j)
                    st_shared_half(place + 2 * j, j < count ? origin[j] : __float2half_rn(0.0f));
            }
        }
    };
    constexpr int AHEAD = STAGES - 1;
#pragma unroll 1
    for (int stage = 0; stage < AHEAD; ++stage)  // no earlier kernel of a step writes weights
        if (stage * CHUNK < k) matrix.load(scratch.weights[stage], stage * CHUNK, first_column);
    wait_on_dependent_grids();
#pragma unroll 1
    for (int stage = 0; stage < AHEAD; ++stage) {
        if (stage * CHUNK < k) load_inputs(stage, stage * CHUNK);
        cp_async_commit_group();
    }
    HeadSums<TOKENS / 16, BY_INPUT> sums;
    for (int from = 0, stage = 0; from < k; from += CHUNK, stage = (stage + 1) % STAGES) {
        if (from + AHEAD * CHUNK < k) {
            matrix.load(scratch.weights[(stage + AHEAD) % STAGES], from + AHEAD * CHUNK, first_column);
            load_inputs((stage + AHEAD) % STAGES, from + AHEAD * CHUNK);
        }
        cp_async_commit_group();
        cp_async_wait_group<AHEAD>();
        __syncthreads();
        sums.add(scratch.inputs[stage], scratch.weights[stage]);
        __syncthreads();
    }
    cp_async_wait_all();
    sums.store(first_token, tokens, first_column, n, factors, out + static_cast<long long>(head) * out_head, out_pitch);
}

}  // namespace bminf

// The kernels of GPTQ (bminf_lite/backend/gptq.py defines it): the inverse root of a Hessian block by block, and the
// rounding of one block of a weight's columns. Matrices are dense, fp32 unless stated otherwise.
#include "common/bfloat16.cuh"
#include "common/common.cuh"
#include "constants/gptq.cuh"

using namespace bminf;

using bf16 = __nv_bfloat16;

// out[i, j] = a[index[i], index[j]], plus `damping` on the diagonal; [k, k]. A block handles one row.
__global__ void __launch_bounds__(THREADS)
    gather_square(const float* a, const int* __restrict__ index, float* out, float damping, int k) {
    wait_on_dependent_grids();
    const int i = blockIdx.x;
    const float* row = a + static_cast<size_t>(index[i]) * k;
    for (int j = threadIdx.x; j < k; j += THREADS)
        out[static_cast<size_t>(i) * k + j] = row[index[j]] + (i == j ? damping : 0.0f);
}

// The Cholesky decomposition L L^T of a block [n, n] of a matrix with rows of `pitch` elements, n at most ROOT_BLOCK.
// The block becomes L, zeros above its diagonal, and `inverse` [n, n] becomes the inverse of L. Pivots are at least
// `smallest`, the least eigenvalue that the damped matrix can have, whatever rounding made of them. One block.
__global__ void __launch_bounds__(THREADS)
    cholesky_block(float* a, long long pitch, float* inverse, float smallest, int n) {
    __shared__ float l[ROOT_BLOCK][ROOT_BLOCK + 1], m[ROOT_BLOCK][ROOT_BLOCK + 1];
    wait_on_dependent_grids();
    for (int e = threadIdx.x; e < n * n; e += THREADS) {
        const int i = e / n, j = e % n;
        l[i][j] = j <= i ? a[i * pitch + j] : 0.0f;
        m[i][j] = 0.0f;
    }
    __syncthreads();
    for (int j = 0; j < n; ++j) {
        const float pivot = __fsqrt_rn(fmaxf(l[j][j], smallest));
        __syncthreads();
        for (int i = j + threadIdx.x; i < n; i += THREADS) l[i][j] = i == j ? pivot : __fdiv_rn(l[i][j], pivot);
        __syncthreads();
        const int rest = n - j - 1;
        for (int e = threadIdx.x; e < rest * rest; e += THREADS) {
            const int i = j + 1 + e / rest, c = j + 1 + e % rest;
            if (c <= i) l[i][c] -= l[i][j] * l[c][j];
        }
        __syncthreads();
    }
    for (int t = threadIdx.x; t < n; t += THREADS) {  // a column of the inverse, from the diagonal down
        m[t][t] = __fdiv_rn(1.0f, l[t][t]);
        for (int i = t + 1; i < n; ++i) {
            float sum = 0;
            for (int c = t; c < i; ++c) sum += l[i][c] * m[c][t];
            m[i][t] = __fdiv_rn(-sum, l[i][i]);
        }
    }
    __syncthreads();
    for (int e = threadIdx.x; e < n * n; e += THREADS) {
        const int i = e / n, j = e % n;
        a[i * pitch + j] = l[i][j];
        inverse[e] = m[i][j];
    }
}

// rest[row, j] = w[row, order[j]] / scale[row], [n, k]. A block handles one row.
template <class T>
__global__ void __launch_bounds__(THREADS)
    gptq_ratios(const T* w, const int* __restrict__ order, const float* scale, float* rest, int k) {
    wait_on_dependent_grids();
    const size_t first = static_cast<size_t>(blockIdx.x) * k;
    for (int j = threadIdx.x; j < k; j += THREADS)
        rest[first + j] = __fdiv_rn(to_float(w[first + order[j]]), scale[blockIdx.x]);
}

// Rounds the columns start, ..., start + count - 1 of rest [n, k], one after another, as round_block defines it.
// root: [k, k], the upper triangular U. Codes go to codes[row, order[column]], int8 [n, pitch], and errors to
// [n, count]. A warp handles one row; lane l holds the columns l, l + 32, ...
__global__ void __launch_bounds__(THREADS) gptq_round(
    const float* rest, const float* __restrict__ root, const int* __restrict__ order, int8* codes, long long pitch,
    float* errors, int n, int k, int start, int count) {
    constexpr int HELD = BLOCK / WARP;
    wait_on_dependent_grids();
    const int lane = threadIdx.x % WARP, row = blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;
    if (row >= n) return;
    rest += static_cast<size_t>(row) * k + start;
    float value[HELD], error[HELD] = {};
#pragma unroll
    for (int h = 0; h < HELD; ++h) value[h] = h * WARP + lane < count ? rest[h * WARP + lane] : 0.0f;
#pragma unroll
    for (int turn = 0; turn < HELD; ++turn) {
        for (int owner = 0; owner < WARP && turn * WARP + owner < count; ++owner) {
            const int column = turn * WARP + owner;
            const float* u = root + static_cast<size_t>(start + column) * k + start;
            const float own = __shfl_sync(FULL, value[turn], owner);
            const float code = fminf(fmaxf(rintf(own), -127.0f), 127.0f);
            const float e = __fdiv_rn(__fsub_rn(own, code), u[column]);
            if (lane == owner) {
                error[turn] = e;
                codes[row * pitch + order[start + column]] = static_cast<int8>(code);
            }
#pragma unroll
            for (int h = turn; h < HELD; ++h) {
                const int later = h * WARP + lane;
                if (later > column && later < count) value[h] = __fsub_rn(value[h], __fmul_rn(e, u[later]));
            }
        }
    }
#pragma unroll
    for (int h = 0; h < HELD; ++h)
        if (h * WARP + lane < count) errors[static_cast<size_t>(row) * count + h * WARP + lane] = error[h];
}

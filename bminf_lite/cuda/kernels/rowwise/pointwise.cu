// Elementwise kernels: of some architectures learned position embeddings and those of token types, the gate of
// attention's output, an activation with learned slopes, and the soft-cap of logits; of every step the copy of its
// integers from the host.
#include "common/values.cuh"

using namespace bminf;

// x = cap * tanh(x / cap) for rows of n columns of fp32. A thread computes one element.
__global__ void __launch_bounds__(256) soft_cap(float* x, long long pitch, int rows, int n, float cap) {
    launch_dependent_grids();
    wait_on_dependent_grids();
    const long long index = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int row = static_cast<int>(index / n), column = static_cast<int>(index % n);
    if (row >= rows) return;
    float& value = x[row * pitch + column];
    value = __fmul_rn(cap, tanhf(__fdiv_rn(value, cap)));
}

// x = fp16(x * sigmoid(gate)), or with SOFTPLUS the softplus, for rows of n columns of fp16. BY_HEAD: a gate for each
// head_dim columns. A thread computes one element.
template <bool SOFTPLUS, bool BY_HEAD>
__global__ void __launch_bounds__(256)
    gate_rows(__half* x, long long pitch, const __half* gate, long long gate_pitch, int rows, int n, int head_dim) {
    launch_dependent_grids();
    wait_on_dependent_grids();
    const long long index = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int row = static_cast<int>(index / n), column = static_cast<int>(index % n);
    if (row >= rows) return;
    const float own = __half2float(gate[row * gate_pitch + (BY_HEAD ? column / head_dim : column)]);
    const float open = SOFTPLUS ? __fadd_rn(own > 0.0f || own != own ? own : 0.0f, log1pf(expf(-fabsf(own))))
                                : __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-own)));
    __half& value = x[row * pitch + column];
    value = __float2half_rn(__fmul_rn(__half2float(value), open));
}

// x = fp16(xielu(x)) for rows of n columns of fp16, backend/functions.py's. A thread has eight neighbouring columns.
__global__ void __launch_bounds__(256)
    xielu(__half* x, long long pitch, int rows, int n, float positive, float negative, float beta, float eps) {
    launch_dependent_grids();
    wait_on_dependent_grids();
    const long long index = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int threads = (n + 7) / 8, row = static_cast<int>(index / threads);
    const int column = static_cast<int>(index % threads) * 8;
    if (row >= rows) return;
    __half* const own = x + row * pitch + column;
    const auto activated = [&](float v) {
        const float slope =
            v > 0.0f ? __fmul_rn(__fmul_rn(positive, v), v) : __fmul_rn(__fsub_rn(expm1f(fminf(v, eps)), v), negative);
        return __fadd_rn(slope, __fmul_rn(beta, v));
    };
    if (column + 8 > n) {
        for (int j = 0; j < n - column; ++j) own[j] = __float2half_rn(activated(__half2float(own[j])));
        return;
    }
    float v[8];
    load8(own, v);
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = activated(v[j]);
    store8(own, v);
}

// residual[token] += table[position of the token]; table: fp16 [positions, pitch]; residual: fp32 [T, residual_pitch].
// A block handles one token. Tokens behind the last sequence pad the step and are left out.
__global__ void __launch_bounds__(256) add_positions(
    const int* cu_seqlens, const int* context_lens, int sequences, const __half* table, long long pitch,
    float* residual, long long residual_pitch, int k) {
    launch_dependent_grids();
    wait_on_dependent_grids();
    const int token = blockIdx.x;
    if (token >= cu_seqlens[sequences]) return;
    int sequence = 0, last = sequences;  // the sequence of the token, by bisection
    while (last - sequence > 1) {
        const int middle = (sequence + last) / 2;
        if (cu_seqlens[middle] <= token)
            sequence = middle;
        else
            last = middle;
    }
    const long long position = context_lens[sequence] + token - cu_seqlens[sequence];
    for (int column = threadIdx.x * 8; column < k; column += blockDim.x * 8) {
        float x[8], r[8];
        load8(table + position * pitch + column, x);
        load8(residual + token * residual_pitch + column, r);
#pragma unroll
        for (int j = 0; j < 8; ++j) r[j] = __fadd_rn(r[j], x[j]);
        store8(residual + token * residual_pitch + column, r);
    }
}

// residual[token] += table[indices[token]], or table[0] if indices is null; table: fp16 [n, pitch]; residual: fp32 [T,
// residual_pitch]. A block handles one token.
__global__ void __launch_bounds__(256) add_rows(
    const int* indices, const __half* table, long long pitch, float* residual, long long residual_pitch, int k) {
    launch_dependent_grids();
    wait_on_dependent_grids();
    const int token = blockIdx.x;
    const __half* const from = table + (indices == nullptr ? 0 : indices[token]) * pitch;
    for (int column = threadIdx.x * 8; column < k; column += blockDim.x * 8) {
        float x[8], r[8];
        load8(from + column, x);
        load8(residual + token * residual_pitch + column, r);
#pragma unroll
        for (int j = 0; j < 8; ++j) r[j] = __fadd_rn(r[j], x[j]);
        store8(residual + token * residual_pitch + column, r);
    }
}

// to[i] = from[i] for i < count. No kernel changes `from`, memory of the host, so it is read before the wait. The next
// kernel does not start early: those behind it may read `to` before they wait.
__global__ void __launch_bounds__(256) write_words(const int* from, int* to, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const int word = i < count ? *static_cast<const volatile int*>(from + i) : 0;
    wait_on_dependent_grids();
    if (i < count) to[i] = word;
}

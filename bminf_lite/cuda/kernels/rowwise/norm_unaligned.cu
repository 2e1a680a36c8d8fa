// Norms of fp32 rows of any width and alignment, in place or not: those too wide for a block's registers are read
// again.
#include "constants/norm_unaligned.cuh"
#include "rowwise/unaligned.cuh"

using namespace bminf;

// Sum over the row of a function of its elements, in fp64 from fp32 sums of eight, which is how other kernels add up.
template <class F>
__device__ __forceinline__ double row_sum(
    const float* row, int k, bool aligned, RowScratch<THREADS>& scratch, int bank, F function) {
    double sum = 0;
    float none = 0, x[8];
    for (int column = threadIdx.x * 8; column < k; column += THREADS * 8) {
        load_some(row + column, k - column, aligned, x);
        float part = 0;
#pragma unroll
        for (int j = 0; j < 8; ++j)
            if (column + j < k) part = function(part, x[j]);
        sum += part;
    }
    row_sum_max<THREADS, true, false>(sum, none, scratch, bank);
    return sum;
}

// A block for each row of k. norm_weight and norm_bias (or null) are padded vectors. out may be x.
template <bool CENTER>
__global__ void __launch_bounds__(THREADS) norm_multi_pass(
    const float* x, long long pitch, const float* norm_weight, const float* norm_bias, float eps, float* out,
    long long out_pitch, int k, bool aligned) {
    __shared__ RowScratch<THREADS> scratch;
    const double share = 1.0 / k;
    launch_dependent_grids();
    wait_on_dependent_grids();
    const float* row = x + blockIdx.x * pitch;
    float mean = 0;
    if constexpr (CENTER) {
        const auto add = [](float sum, float v) { return sum + v; };
        mean = static_cast<float>(row_sum(row, k, aligned, scratch, 1, add) * share);
    }
    const auto square = [mean](float sum, float v) { return fmaf(v - mean, v - mean, sum); };
    const double squares = row_sum(row, k, aligned, scratch, 0, square);
    const float inverse = __fdiv_rn(1.0f, __fsqrt_rn(static_cast<float>(squares * share) + eps));
    for (int column = threadIdx.x * 8; column < k; column += THREADS * 8) {
        float v[8], g[8], b[8] = {};
        load_some(row + column, k - column, aligned, v);
        load8(norm_weight + column, g);
        if (norm_bias) load8(norm_bias + column, b);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            v[j] = __fmul_rn(__fmul_rn(v[j] - mean, g[j]), inverse);
            if (norm_bias) v[j] = __fadd_rn(v[j], b[j]);
        }
        store_some(out + blockIdx.x * out_pitch + column, k - column, aligned, v);
    }
}

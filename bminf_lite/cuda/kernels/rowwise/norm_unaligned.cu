// RMSNorm or LayerNorm of fp32 rows of any width and alignment, one block a row:
//
//     out = (x - mean) * norm_weight / sqrt(mean((x - mean)^2) + eps) + norm_bias
//
// The row is read once for each reduction and once more for the output, so it need not fit into registers.
#include "constants/norm_unaligned.cuh"
#include "rowwise/unaligned.cuh"

using namespace bminf;

constexpr int VECTORS = ROW_SUM_VECTORS / THREADS;  // of a thread, before it begins again with the first

// Folds function(sum, element) over the vectors of a row, and adds them in the one order of a row's sums.
template <class F>
__device__ __forceinline__ double row_sum(
    const float* row, int k, bool aligned, RowScratch<THREADS, VECTORS>& scratch, int bank, F function) {
    double sum[VECTORS] = {};
    float none = 0, x[8];
    for (int first = threadIdx.x * 8; first < k; first += ROW_SUM_VECTORS * 8)
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int column = first + i * THREADS * 8;
            load_some(row + column, k - column, aligned, x);
            float part = 0;
#pragma unroll
            for (int j = 0; j < 8; ++j)
                if (column + j < k) part = function(part, x[j]);
            sum[i] += part;
        }
    row_sum_max<THREADS, false>(sum, none, scratch, bank);
    return sum[0];
}

// CENTER: LayerNorm, else RMSNorm. norm_weight: fp32 [k], padded; norm_bias: the same, or null. out may be x.
template <bool CENTER>
__global__ void __launch_bounds__(THREADS) norm_multi_pass(
    const float* x, long long pitch, const float* norm_weight, const float* norm_bias, float eps, float* out,
    long long out_pitch, int k, bool aligned) {
    __shared__ RowScratch<THREADS, VECTORS> scratch;
    const double inverse_k = 1.0 / k;
    launch_dependent_grids();
    wait_on_dependent_grids();
    const float* row = x + blockIdx.x * pitch;
    float mean = 0;
    if constexpr (CENTER) {
        const auto add = [](float sum, float v) { return sum + v; };
        mean = static_cast<float>(row_sum(row, k, aligned, scratch, 1, add) * inverse_k);
    }
    const auto square = [mean](float sum, float v) { return fmaf(v - mean, v - mean, sum); };
    const double squares = row_sum(row, k, aligned, scratch, 0, square);
    const float inverse = __fdiv_rn(1.0f, __fsqrt_rn(static_cast<float>(squares * inverse_k) + eps));
    for (int column = threadIdx.x * 8; column < k; column += THREADS * 8) {
        float v[8], weight[8], bias[8] = {};
        load_some(row + column, k - column, aligned, v);
        load8(norm_weight + column, weight);
        if (norm_bias) load8(norm_bias + column, bias);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            v[j] = __fmul_rn(__fmul_rn(v[j] - mean, weight[j]), inverse);
            if (norm_bias) v[j] = __fadd_rn(v[j], bias[j]);
        }
        store_some(out + blockIdx.x * out_pitch + column, k - column, aligned, v);
    }
}

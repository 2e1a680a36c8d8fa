// RMSNorm or LayerNorm of fp32 rows of any width and alignment, one block a row:
//
//     out = (x - mean) * norm_weight / sqrt(mean((x - mean)^2) + eps) + norm_bias
//
// The row is read once for its sums and once more for the output, so it need not fit into registers.
#include "constants/norm_unaligned.cuh"
#include "rowwise/unaligned.cuh"

using namespace bminf;

constexpr int VECTORS = ROW_SUM_VECTORS / THREADS;  // of a thread, before it begins again with the first

// The mean of a row, 0 without CENTER, and its inverse deviation. inverse_k: 1 / k.
template <bool CENTER>
__device__ __forceinline__ RowStatistics row_statistics(
    const float* row, int k, bool aligned, double inverse_k, float eps, RowScratch<THREADS, VECTORS>& scratch) {
    double sum[VECTORS] = {}, squares[VECTORS] = {};
    for (int first = threadIdx.x * 8; first < k; first += ROW_SUM_VECTORS * 8)
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int column = first + i * THREADS * 8;
            float x[8];
            load_some(row + column, k - column, aligned, x);
            if constexpr (CENTER) {
                double part, part_squares;
                vector_sums(x, k - column, part, part_squares);
                sum[i] += part, squares[i] += part_squares;
            } else {
                float part = 0;
#pragma unroll
                for (int j = 0; j < 8; ++j) part = fmaf(x[j], x[j], part);
                squares[i] += part;
            }
        }
    if constexpr (CENTER) {
        double total[2];
        row_two_sums<THREADS>([&](int i, double& a, double& b) { a = sum[i], b = squares[i]; }, total, scratch);
        return layer_norm_statistics(total[0], total[1], inverse_k, eps);
    } else {
        float none = 0;
        row_sum_max<THREADS, false>(squares, none, scratch, 0);
        return {0, inverse_deviation(static_cast<float>(squares[0] * inverse_k), eps)};
    }
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
    const auto [mean, inverse] = row_statistics<CENTER>(row, k, aligned, inverse_k, eps, scratch);
    for (int column = threadIdx.x * 8; column < k; column += THREADS * 8) {
        float v[8], weight[8], bias[8] = {};
        load_some(row + column, k - column, aligned, v);
        load8(norm_weight + column, weight);
        if (norm_bias) load8(norm_bias + column, bias);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            v[j] = __fmul_rn(__fmul_rn(__fsub_rn(v[j], mean), weight[j]), inverse);
            if (norm_bias) v[j] = __fadd_rn(v[j], bias[j]);
        }
        store_some(out + blockIdx.x * out_pitch + column, k - column, aligned, v);
    }
}

// One vector for each sequence of a step, of the vectors of its tokens: the first or the last one, the largest values,
// or a sum over the tokens divided by a number that depends on their count.
//
// The order of sums is that of backend/operations/rows.py: LANES lanes, each of which adds every LANES-th token;
// then neighbouring lanes are added.
#include "common/common.cuh"
#include "constants/pooling.cuh"

using namespace bminf;

// x: fp32 [T, pitch]; skipped: of each sequence the first tokens that are left out, or null; out: fp32 [sequences,
// out_pitch]. Sequence b has the tokens cu_seqlens[b] to cu_seqlens[b + 1] - 1. A block computes COLUMNS columns of one
// sequence, grid (sequences, columns / COLUMNS); a warp is a lane of the sum.
template <int KIND>
__global__ void __launch_bounds__(LANES* COLUMNS) pool(
    const float* x, long long pitch, const int* cu_seqlens, const int* skipped, float* out, long long out_pitch,
    int n) {
    __shared__ float parts[LANES][COLUMNS];
    launch_dependent_grids();
    wait_on_dependent_grids();
    const int sequence = blockIdx.x, lane = threadIdx.x / COLUMNS, place = threadIdx.x % COLUMNS;
    const int column = blockIdx.y * COLUMNS + place;
    const int start = cu_seqlens[sequence], tokens = cu_seqlens[sequence + 1] - start;
    const int first = skipped ? min(skipped[sequence], tokens) : 0, count = tokens - first;
    float result = KIND == POOL_MAX ? -INF_F : 0.0f;
    if (column < n && count > 0) {
        const float* const rows = x + static_cast<long long>(start + first) * pitch + column;
        if (KIND == POOL_FIRST) {
            result = rows[0];
        } else if (KIND == POOL_LAST) {
            result = rows[(count - 1) * pitch];
        } else {
            for (int i = lane; i < count; i += LANES) {
                const float value = rows[i * pitch];
                if (KIND == POOL_MAX)
                    result = max_or_nan(result, value);
                else if (KIND == POOL_WEIGHTED_MEAN)
                    result = __fadd_rn(result, __fmul_rn(value, static_cast<float>(first + 1 + i)));
                else
                    result = __fadd_rn(result, value);
            }
        }
    }
    if (KIND != POOL_FIRST && KIND != POOL_LAST) {
        parts[lane][place] = result;
        for (int step = 1; step < LANES; step *= 2) {
            __syncthreads();
            if (lane % (2 * step) == 0) {
                const float other = parts[lane + step][place];
                result = KIND == POOL_MAX ? max_or_nan(result, other) : __fadd_rn(result, other);
                parts[lane][place] = result;
            }
        }
    }
    if (lane != 0 || column >= n) return;
    float total = static_cast<float>(count);
    if (KIND == POOL_MEAN_SQRT_LEN) total = __fsqrt_rn(total);
    if (KIND == POOL_WEIGHTED_MEAN) {
        const long long last = tokens, before = first;
        total = __ll2float_rn(last * (last + 1) / 2 - before * (before + 1) / 2);
    }
    const bool is_sum = KIND == POOL_MEAN || KIND == POOL_MEAN_SQRT_LEN || KIND == POOL_WEIGHTED_MEAN;
    if (is_sum && count > 0) result = __fdiv_rn(result, total);
    out[sequence * out_pitch + column] = count > 0 ? result : 0.0f;
}

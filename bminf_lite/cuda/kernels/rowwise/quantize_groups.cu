// Int8 codes and a scale for each group of neighbouring elements of a row, see row_scale.
#include "common/common.cuh"

using namespace bminf;

constexpr int THREADS = 256;

// x: T [rows, pitch]; codes: int8 [rows, groups * padded], a group of `group` elements with zeros up to `padded`; scales:
// fp32, those of a group of all rows side by side, `stride` elements from group to group. A warp handles a group of a
// row.
template <class T>
__global__ void __launch_bounds__(THREADS) quantize_groups(
    const T* x, long long pitch, int8* codes, float* scales, long long stride, int rows, int group, int padded,
    int groups) {
    launch_dependent_grids();
    wait_on_dependent_grids();
    const long long index = static_cast<long long>(blockIdx.x) * (THREADS / WARP) + warp_index();
    const int row = static_cast<int>(index / groups), g = static_cast<int>(index % groups), lane = threadIdx.x % WARP;
    if (row >= rows) return;
    const T* from = x + row * pitch + static_cast<long long>(g) * group;
    float top = 0;
    for (int i = lane; i < group; i += WARP) top = absmax(top, to_float(from[i]));
    const RowScale s = row_scale(warp_absmax(top));
    if (lane == 0) scales[g * stride + row] = s.scale;
    int8* to = codes + (static_cast<long long>(row) * groups + g) * padded;
    for (int i = lane; i < padded; i += WARP) {
        const bool is_zero = i >= group || s.ratio == 0.0f;
        to[i] = is_zero ? 0 : static_cast<int8>(__float2int_rn(__fmul_rn(to_float(from[i]), s.ratio)));
    }
}

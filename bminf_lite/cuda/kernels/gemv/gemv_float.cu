// Matrix-vector products in floating point, for one or a few rows: an fp16 weight, or an int8 weight whose input is not
// quantized.
//
//     out[row] = epilogue(w_scale * (weight @ fp16(rotate(norm(x[row])))) + bias)
//
// x: fp16 or fp32 [rows, x_pitch]; weight: fp16 or int8 [n, pitch]; w_scale: fp32 [n] or null; bias: fp32 [n] or null;
// out: fp16 or fp32 [rows, out_pitch].
//
// A GROUPED int8 weight has a scale for each group of neighbouring columns instead of w_scale: group_scale [n, groups],
// fp16 if half_scales, else fp32. A group has 1 << group_shift columns, 16 or more. Sixteen products are summed,
// scaled, and added to the warp's part of the sum.
//
// The norm and the rotation may be left out. The grid is (any, rows). Each block puts its input row into shared memory
// as fp16; then each warp computes one output at a time, in fp32 and in a fixed order, so that results do not depend on
// the grid.
#include "common/common.cuh"
#include "common/epilogue.cuh"
#include "common/rotation.cuh"
#include "constants/gemv.cuh"

using namespace bminf;

constexpr int WARPS = THREADS / WARP;

// acc plus the product of 16 bytes of a weight row and the same columns of x.
__device__ __forceinline__ float dot(const __half* w, const __half* x, float acc) {
    float a[8], b[8];
    load8(w, a), load8(x, b);
#pragma unroll
    for (int i = 0; i < 8; ++i) acc = fmaf(a[i], b[i], acc);
    return acc;
}

__device__ __forceinline__ float dot(const int8* w, const __half* x, float acc) {
    const int4 raw = __ldcs(reinterpret_cast<const int4*>(w));
    const int8* c = reinterpret_cast<const int8*>(&raw);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float b[8];
        load8(x + 8 * h, b);
#pragma unroll
        for (int i = 0; i < 8; ++i) acc = fmaf(static_cast<float>(c[8 * h + i]), b[i], acc);
    }
    return acc;
}

__device__ __forceinline__ float group_scale_of(const void* scale, bool half_scales, long long i) {
    return half_scales ? __half2float(__ldg(static_cast<const __half*>(scale) + i))
                       : __ldg(static_cast<const float*>(scale) + i);
}

// INPUT: what is multiplied, x, a norm of it, or either rotated in blocks of `rotation` elements (see rotate_row).
// VECTORS: vectors of eight elements of x per thread. W: __half or int8. F: the function of GATED and ACTIVATED.
// GROUPED is a template's argument because the other products would spill registers beside its loop.
// Dynamic shared memory: `pitch` fp16 numbers.
template <int INPUT, int VECTORS, class W, int EPILOGUE, int F, bool GROUPED>
__global__ void __launch_bounds__(THREADS) gemv_float(
    const void* x, long long x_pitch, const float* norm_weight, const float* norm_bias, float eps, int rotation,
    float rotation_scale, const W* __restrict__ weight, const float* __restrict__ w_scale,
    const float* __restrict__ bias, void* out, long long out_pitch, int n, int k, int pitch,
    const void* __restrict__ group_scale, int half_scales, int groups, int group_shift) {
    extern __shared__ __align__(16) char shared[];
    __shared__ RowScratch<THREADS, VECTORS> scratch;
    __half* row = reinterpret_cast<__half*>(shared);
    launch_dependent_grids();
    wait_on_dependent_grids();
    {
        constexpr bool NORMED = INPUT != HALF && INPUT != ROTATED;
        constexpr bool CENTER = INPUT == LAYER_NORM || INPUT == ROTATED_LAYER_NORM;
        constexpr bool IS_ROTATED = INPUT == ROTATED || INPUT == ROTATED_RMS_NORM || INPUT == ROTATED_LAYER_NORM;
        using Source = typename Conditional<NORMED, float, __half>::type;
        const Source* source = static_cast<const Source*>(x) + blockIdx.y * x_pitch;
        float v[VECTORS][8];
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) load_row8(source, (i * THREADS + threadIdx.x) * 8, k, pitch, v[i]);
        if constexpr (NORMED) normalise_row<THREADS, CENTER, false>(v, norm_weight, norm_bias, eps, k, pitch, scratch);
        if constexpr (IS_ROTATED) rotate_row<false>(v, rotation, rotation_scale);
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int column = (i * THREADS + threadIdx.x) * 8;
            if (column < pitch) store8(row + column, v[i]);
        }
    }
    __syncthreads();
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int outputs = EPILOGUE == GATED ? n / 2 : n;
    constexpr int STEP = 16 / sizeof(W);
    auto product = [&](int r) {
        float sum = 0;
        const W* w = weight + static_cast<size_t>(r) * pitch;
        if constexpr (GROUPED) {
            const long long first = static_cast<long long>(r) * groups;
#pragma unroll 4
            for (int column = lane * STEP; column < pitch; column += WARP * STEP)
                sum = fmaf(
                    group_scale_of(group_scale, half_scales, first + (column >> group_shift)),
                    dot(w + column, row + column, 0.0f), sum);
        } else {
#pragma unroll 4
            for (int column = lane * STEP; column < pitch; column += WARP * STEP)
                sum = dot(w + column, row + column, sum);
        }
#pragma unroll
        for (int d = WARP / 2; d; d /= 2) sum += __shfl_xor_sync(FULL, sum, d);
        if (w_scale) sum = __fmul_rn(w_scale[r], sum);
        return bias ? __fadd_rn(sum, bias[r]) : sum;
    };
    for (int i = blockIdx.x * WARPS + warp; i < outputs; i += gridDim.x * WARPS) {
        const float y = product(i);
        const float up = EPILOGUE == GATED ? product(outputs + i) : 0.0f;
        if (lane != 0) continue;
        const long long index = blockIdx.y * out_pitch + i;
        if constexpr (EPILOGUE == ADD)
            static_cast<float*>(out)[index] += rounded(y);
        else
            store_output<EPILOGUE, F>(out, index, y, up, 0.0f);
    }
}

// What the kernels share: dependent launch, reductions, the int8 quantization of one row, and vectors of eight.
//
// Memory: every row of a matrix starts at a multiple of 16 elements and is that long in memory ("pitch"), so a thread
// may read and write eight elements at once anywhere; what lies past the last column is never used as a value.
#pragma once
#include <cuda_fp16.h>

#include "constants/activation.cuh"

namespace bminf {

constexpr int WARP = 32;
constexpr unsigned FULL = 0xffffffffu;
#define NAN_F __int_as_float(0x7fc00000)
#define INF_F __int_as_float(0x7f800000)

using int8 = signed char;

template <bool CONDITION, class A, class B>
struct Conditional {
    using type = A;
};
template <class A, class B>
struct Conditional<false, A, B> {
    using type = B;
};

// A kernel launched as dependent may start before its predecessor has ended, and that one before its own: what a kernel
// does before this call must not touch anything that others of the same step write. What was there before the step it
// may read, because the kernel that a step begins with, `embed`, lets nobody start before it has ended. Without such
// launches both calls do nothing.
__device__ __forceinline__ void wait_on_dependent_grids() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void launch_dependent_grids() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- vectors of eight --------------------------------------------------------------------------------------------

__device__ __forceinline__ void load8(const __half* p, float (&x)[8]) {
    const uint4 raw = *reinterpret_cast<const uint4*>(p);
    const __half2* pair = reinterpret_cast<const __half2*>(&raw);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 f = __half22float2(pair[i]);
        x[2 * i] = f.x;
        x[2 * i + 1] = f.y;
    }
}

__device__ __forceinline__ void load8(const float* p, float (&x)[8]) {
    const float4 a = reinterpret_cast<const float4*>(p)[0], b = reinterpret_cast<const float4*>(p)[1];
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}

__device__ __forceinline__ void load8(const int* p, float (&x)[8]) {
    const int4 a = reinterpret_cast<const int4*>(p)[0], b = reinterpret_cast<const int4*>(p)[1];
    const int v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = __int2float_rn(v[i]);
}

__device__ __forceinline__ void store8(__half* p, const float (&x)[8]) {
    uint4 raw;
    __half2* pair = reinterpret_cast<__half2*>(&raw);
#pragma unroll
    for (int i = 0; i < 4; ++i) pair[i] = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
    *reinterpret_cast<uint4*>(p) = raw;
}

__device__ __forceinline__ void store8(float* p, const float (&x)[8]) {
    reinterpret_cast<float4*>(p)[0] = make_float4(x[0], x[1], x[2], x[3]);
    reinterpret_cast<float4*>(p)[1] = make_float4(x[4], x[5], x[6], x[7]);
}

// The vectors of a warp's lanes, each at its own column of a row that ends at `end`. Two float4 at 32 bytes from lane
// to lane would fill half a sector each, which takes an L2 cache twice as long: neighbours, whose vectors lie side by
// side from a multiple of 16 elements on, exchange halves and write whole ones. All lanes take part.
__device__ __forceinline__ void store_vector(__half* row, int column, int end, const float (&x)[8]) {
    if (column < end) store8(row + column, x);
}

__device__ __forceinline__ void store_vector(float* row, int column, int end, const float (&x)[8]) {
    const bool odd = threadIdx.x % 2;
    float first[4], second[4];  // of the even lane's vector, and of the odd one's
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const float other = __shfl_xor_sync(FULL, odd ? x[j] : x[4 + j], 1);
        first[j] = odd ? other : x[j];
        second[j] = odd ? x[4 + j] : other;
    }
    const int even = column - 8 * odd, half = 4 * odd;
    if (even < end) *reinterpret_cast<float4*>(row + even + half) = make_float4(first[0], first[1], first[2], first[3]);
    if (even + 8 < end)
        *reinterpret_cast<float4*>(row + even + 8 + half) = make_float4(second[0], second[1], second[2], second[3]);
}

// 16 bytes asked for here and now: left to itself, the compiler moves a load to where it is used, and a thread then
// waits for one vector before it asks for the next. Not under a condition, for the same reason.
__device__ __forceinline__ uint4 ld_global_v4(const void* p) {
    uint4 x;
    asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(p)
                 : "memory");
    return x;
}

// Brings a line of 128 bytes to the L2 cache.
__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// 2^x to 2^-22 of it, and 0 where that is subnormal.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float rounded(float x) { return __half2float(__float2half_rn(x)); }

// ---- reductions over the threads of a row ------------------------------------------------------------------------

// A barrier among the first THREADS threads of a block; others need not take part.
template <int THREADS>
__device__ __forceinline__ void sync_threads() {
    asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}

// Room for the warps of a row to exchange what they found, twice: while one reduction's results are still being read,
// the next writes the other bank, and so needs no barrier before it.
template <int THREADS>
struct RowScratch {
    static constexpr int WARPS = THREADS > WARP ? THREADS / WARP : 1;
    double sum[2][WARPS];
    float top[2][WARPS];
};

// The larger magnitude, or NaN if either is NaN. `a` is not negative.
__device__ __forceinline__ float absmax(float a, float b) {
#if __CUDA_ARCH__ >= 800
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(fabsf(b)));
    return c;
#else
    // The bits of a magnitude order like the number, and those of a NaN come last.
    return __uint_as_float(max(__float_as_uint(a), __float_as_uint(b) & 0x7fffffffu));
#endif
}

// Over LANES neighbouring lanes, a power of two, or as many values repeated through a warp.
template <bool SUM, bool TOP, int LANES>
__device__ __forceinline__ void lanes_sum_max(double& sum, float& top) {
#pragma unroll
    for (int d = LANES / 2; d; d /= 2) {
        if constexpr (SUM) sum += __shfl_xor_sync(FULL, sum, d);
        if constexpr (TOP) top = absmax(top, __shfl_xor_sync(FULL, top, d));
    }
}

// Sum in fp64 (which rounds to the same fp32 whatever the number of threads, but for rare ties) and largest magnitude
// over the THREADS of a row, a power of two up to a block; rows of less than a warp share one. Calls that follow each
// other take banks in turn.
template <int THREADS, bool SUM, bool TOP>
__device__ __forceinline__ void row_sum_max(double& sum, float& top, RowScratch<THREADS>& scratch, int bank) {
    lanes_sum_max<SUM, TOP, (THREADS < WARP ? THREADS : WARP)>(sum, top);
    if constexpr (THREADS > WARP) {
        constexpr int WARPS = THREADS / WARP;
        if (threadIdx.x % WARP == 0) {
            if constexpr (SUM) scratch.sum[bank][threadIdx.x / WARP] = sum;
            if constexpr (TOP) scratch.top[bank][threadIdx.x / WARP] = top;
        }
        sync_threads<THREADS>();
        if constexpr (SUM) sum = scratch.sum[bank][threadIdx.x % WARPS];
        if constexpr (TOP) top = scratch.top[bank][threadIdx.x % WARPS];
        lanes_sum_max<SUM, TOP, WARPS>(sum, top);
    }
}

// ---- one row, spread over THREADS as vectors: thread t holds elements 8 (i THREADS + t) .. + 8 -------------------------

// Blocks of a row kernel that a multiprocessor must have room for: with too few threads, too little of memory is under
// way.
constexpr int resident_blocks(int threads, int vectors) {
    if (vectors != 4) return 1;
    return threads <= 128 ? 6 : threads == 256 ? 3 : 2;
}

// Zero in the columns from k on, where `x` begins at `column`.
__device__ __forceinline__ void zero_tail(float (&x)[8], int column, int k) {
    if (column + 8 > k)
#pragma unroll
        for (int j = 0; j < 8; ++j)
            if (column + j >= k) x[j] = 0;
}

template <class Source>
__device__ __forceinline__ void load_row8(const Source* row, int column, int k, int pitch, float (&x)[8]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = 0;
    if (column >= pitch) return;
    load8(row + column, x);
    zero_tail(x, column, k);
}

template <int THREADS, int VECTORS>
__device__ __forceinline__ float row_max(const float (&v)[VECTORS][8], RowScratch<THREADS>& scratch, int bank = 0) {
    double none = 0;
    float top = 0;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) top = absmax(top, v[i][j]);
    row_sum_max<THREADS, false, true>(none, top, scratch, bank);
    return top;
}

// RMSNorm, or with CENTER LayerNorm, of a row in place; with TOP it returns the largest magnitude of the result. In
// fp32 it is (x - mean) * norm_weight * inverse + norm_bias; because rounding keeps order, the largest |x norm_weight|
// gives the largest result.
template <int THREADS, bool CENTER, bool TOP, int VECTORS>
__device__ __forceinline__ float normalise_row(
    float (&v)[VECTORS][8], const float* __restrict__ norm_weight, const float* __restrict__ norm_bias, float eps,
    int k, int pitch, RowScratch<THREADS>& scratch) {
    const int thread = threadIdx.x % THREADS;
    const double share = 1.0 / k;  // before the row is used, so while it is on its way
    float top = 0;
    if constexpr (CENTER) {
        double sum = 0;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            float part = 0;
#pragma unroll
            for (int j = 0; j < 8; ++j) part += v[i][j];
            sum += part;
        }
        row_sum_max<THREADS, true, false>(sum, top, scratch, 1);
        const float mean = static_cast<float>(sum * share);
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
#pragma unroll
            for (int j = 0; j < 8; ++j) v[i][j] -= mean;
            if (k < THREADS * VECTORS * 8) zero_tail(v[i], (i * THREADS + thread) * 8, k);
        }
    }
    double sum = 0;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        float part = 0, g[8];
        load_row8(norm_weight, (i * THREADS + thread) * 8, k, pitch, g);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            part = fmaf(v[i][j], v[i][j], part);
            v[i][j] = __fmul_rn(v[i][j], g[j]);
            if constexpr (TOP) top = absmax(top, v[i][j]);
        }
        sum += part;
    }
    row_sum_max<THREADS, true, TOP>(sum, top, scratch, 0);
    const float inverse = __fdiv_rn(1.0f, __fsqrt_rn(static_cast<float>(sum * share) + eps));
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) v[i][j] = __fmul_rn(v[i][j], inverse);
    if (norm_bias == nullptr) return __fmul_rn(top, inverse);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        float g[8];
        load_row8(norm_bias, (i * THREADS + thread) * 8, k, pitch, g);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[i][j] = __fadd_rn(v[i][j], g[j]);
    }
    return TOP ? row_max<THREADS>(v, scratch, 1) : 0.0f;
}

// ---- per-token int8 ----------------------------------------------------------------------------------------------

// From the largest magnitude a of a row: codes are rint(x * ratio) clipped to +-127, and the scale kept is a / 127.
// A NaN or an infinity gives scale NaN and ratio 0; a zero row, or one too small for 127 / a, gives 0 and 0.
struct RowScale {
    float ratio, scale;
};

__device__ __forceinline__ RowScale row_scale(float a) {
    const float ratio = __fdiv_rn(127.0f, a);
    if (!(a < INF_F)) return {0.0f, NAN_F};
    if (!(ratio < INF_F)) return {0.0f, 0.0f};
    return {ratio, __fdiv_rn(a, 127.0f)};
}

// Eight codes. Adding 1.5 * 2^23 rounds half to even and leaves the integer in the sum's low byte; |x * ratio| rounds
// to 127 at most, because the row's largest magnitude times `ratio` does.
__device__ __forceinline__ uint2 quantize8(const float (&x)[8], float ratio) {
    unsigned word[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        unsigned sum[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[j] = __float_as_uint(__fadd_rn(__fmul_rn(x[4 * i + j], ratio), 12582912.0f));
        word[i] = __byte_perm(__byte_perm(sum[0], sum[1], 0x0040), __byte_perm(sum[2], sum[3], 0x0040), 0x5410);
    }
    return ratio == 0.0f ? make_uint2(0, 0) : make_uint2(word[0], word[1]);
}

// The scaled product: s_x * (s_w * acc) + bias, each operation rounded on its own.
__device__ __forceinline__ float scaled(float acc, float x_scale, float w_scale) {
    return __fmul_rn(x_scale, __fmul_rn(w_scale, acc));
}

// ---- activation functions, in fp32 -------------------------------------------------------------------------------

template <int F>
__device__ __forceinline__ float activate(float x) {
    if constexpr (F == SILU) return __fdividef(x, 1.0f + __expf(-x));  // 2^-20, and the result is rounded to fp16
    if constexpr (F == GELU_TANH) return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
    if constexpr (F == GELU) return 0.5f * x * erfcf(-0.70710678118654752f * x);
    return fmaxf(x, 0.0f);
}

}  // namespace bminf

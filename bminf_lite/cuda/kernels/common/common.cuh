// Helpers of all kernels: programmatic dependent launch, vectors of eight elements, reductions over a row, norms, the
// int8 quantization of a row, and activation functions.
//
// Memory layout: every row of a matrix starts at a multiple of 16 elements, and its distance to the next row ("pitch")
// is a multiple of 16 elements. So a thread may read and write eight elements at once anywhere. Padding behind the last
// column may hold anything; kernels must not let it change a result.
#pragma once
#include <cuda_fp16.h>

#include "constants/activation.cuh"

namespace bminf {

constexpr int WARP = 32;
constexpr unsigned FULL = 0xffffffffu;  // the mask of all lanes of a warp
#define NAN_F __int_as_float(0x7fc00000)
#define INF_F __int_as_float(0x7f800000)

using int8 = signed char;

// The warp's index in its block. The exchange tells the compiler that it is the same in all lanes, so that what follows
// from it takes uniform registers.
__device__ __forceinline__ int warp_index() { return __shfl_sync(FULL, static_cast<int>(threadIdx.x) / WARP, 0); }

template <bool CONDITION, class A, class B>
struct Conditional {
    using type = A;
};
template <class A, class B>
struct Conditional<false, A, B> {
    using type = B;
};

// ---- programmatic dependent launch -------------------------------------------------------------------------------

// A kernel launched as dependent may start before its predecessor has ended. Before this call, a kernel must neither
// read what earlier kernels of the same step write nor write what they read. It may read what was written before the
// step, weights above all, because `embed`, the first kernel of a step, calls launch_dependent_grids after this call.
// Every kernel must call this, because its own end implies the end of its predecessors only then.
__device__ __forceinline__ void wait_on_dependent_grids() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Once every block has called this or ended, the next kernel of the stream may start.
__device__ __forceinline__ void launch_dependent_grids() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- vectors of eight --------------------------------------------------------------------------------------------

__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(float x) { return x; }

// Two fp32 values as a register of two fp16 values, `low` in the low half.
__device__ __forceinline__ unsigned pack_half2(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const unsigned*>(&pair);
}

__device__ __forceinline__ float2 unpack_half2(unsigned pair) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

// Eight elements as fp32. The address is a multiple of 16 bytes.
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

// store8 by all lanes of a warp, lane t at column `column` = first + 8 t of a row, where `column` is below `end`.
__device__ __forceinline__ void store_vector(__half* row, int column, int end, const float (&x)[8]) {
    if (column < end) store8(row + column, x);
}

// The same in fp32. Two float4 a lane would make each store instruction fill only half of every 32-byte sector, which
// takes the L2 cache twice as long. So neighbouring lanes exchange halves first, and each instruction fills whole
// sectors.
__device__ __forceinline__ void store_vector(float* row, int column, int end, const float (&x)[8]) {
    const bool odd = threadIdx.x % 2;
    float first[4], second[4];  // half of the even lane's vector, and half of the odd lane's
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

// A load of 16 bytes that the compiler neither moves nor delays. Several of these in a row are in flight together,
// whereas the compiler may place ordinary loads next to their uses, one after another. Call it unconditionally.
__device__ __forceinline__ uint4 ld_global_v4(const void* p) {
    uint4 x;
    asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(p)
                 : "memory");
    return x;
}

// The same of 8 bytes.
__device__ __forceinline__ uint2 ld_global_v2(const void* p) {
    uint2 x;
    asm volatile("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(p) : "memory");
    return x;
}

// ld_global_v4 past the L1 cache, where a kernel that does not wait for its predecessor may find older values.
__device__ __forceinline__ uint4 ld_global_cg_v4(const void* p) {
    uint4 x;
    asm volatile("ld.global.cg.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(p)
                 : "memory");
    return x;
}

// A load that the compiler neither moves nor delays: it would move one of memory that nothing writes behind the wait
// for a kernel's input.
__device__ __forceinline__ float ld_global(const float* p) {
    float x;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(x) : "l"(p) : "memory");
    return x;
}

__device__ __forceinline__ int ld_global(const int* p) {
    int x;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}

// The same past the L1 cache, for what another kernel may have written since this one has started.
__device__ __forceinline__ float ld_global_cg(const float* p) {
    float x;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(p) : "memory");
    return x;
}

// Adds to a counter, and returns what it was before. What this block wrote before is visible to those who acquire it,
// and this block acquires what others released.
__device__ __forceinline__ int atomic_add_acq_rel(int* counter, int x) {
    int before;
    asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(x) : "memory");
    return before;
}

// Loads a cache line of 128 bytes into the L2 cache.
__device__ __forceinline__ void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// 2^x with a relative error of 2^-22; 0 where the result would be subnormal.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / x, within one unit in the last place; 0 for an infinity.
__device__ __forceinline__ float reciprocal_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// x rounded to fp16.
__device__ __forceinline__ float rounded(float x) { return __half2float(__float2half_rn(x)); }

// ---- reductions over the threads of a row ------------------------------------------------------------------------

// A barrier of the first THREADS threads of a block.
template <int THREADS>
__device__ __forceinline__ void sync_threads() {
    asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}

// Shared memory in which the warps of a row exchange partial results; a thread has N vectors of the row. There are two
// banks: a reduction may write one while other warps still read the results of the reduction before from the other,
// without a barrier in between.
template <int THREADS, int N = 1>
struct RowScratch {
    static constexpr int WARPS = THREADS > WARP ? THREADS / WARP : 1;
    double sum[2][WARPS * N];
    float top[2][WARPS];
};

// The maximum of `top` and the magnitudes of eight fp16 or bf16 elements, in each half of a register: the bits of
// magnitudes order like these, and NaN is the largest.
__device__ __forceinline__ unsigned packed_max(unsigned top, const uint4& x) {
    const unsigned (&pairs)[4] = reinterpret_cast<const unsigned (&)[4]>(x);
#pragma unroll
    for (int j = 0; j < 4; ++j) top = __vmaxu2(top, pairs[j] & 0x7fff7fffu);
    return top;
}

// max(a, b), or NaN if either is NaN: fmaxf drops a NaN.
__device__ __forceinline__ float max_or_nan(float a, float b) {
#if __CUDA_ARCH__ >= 800
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
#else
    return a != a || b != b ? NAN_F : fmaxf(a, b);
#endif
}

// max(a, |b|), or NaN if either is NaN. `a` is not negative.
__device__ __forceinline__ float absmax(float a, float b) {
#if __CUDA_ARCH__ >= 800
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(fabsf(b)));
    return c;
#else
    // The bits of non-negative floats order like the floats, and NaN is the largest.
    return __uint_as_float(max(__float_as_uint(a), __float_as_uint(b) & 0x7fffffffu));
#endif
}

// The larger half of what packed_max found.
template <class T = __half>
__device__ __forceinline__ float larger_of(unsigned top) {
    const T* halves = reinterpret_cast<const T*>(&top);
    return absmax(to_float(halves[0]), to_float(halves[1]));
}

// The maximum over a warp of values that are not negative, in all lanes; NaN if one of them is NaN.
__device__ __forceinline__ float warp_absmax(float x) {
#if __CUDA_ARCH__ >= 800
    // The bits of non-negative floats order like the floats, and NaN is the largest.
    return __uint_as_float(__reduce_max_sync(FULL, __float_as_uint(x)));
#else
#pragma unroll
    for (int d = WARP / 2; d; d /= 2) x = absmax(x, __shfl_xor_sync(FULL, x, d));
    return x;
#endif
}

// The sum and the absmax over each group of LANES neighbouring lanes (a power of two), in all lanes.
template <bool SUM, bool TOP, int LANES>
__device__ __forceinline__ void lanes_sum_max(double& sum, float& top) {
#pragma unroll
    for (int d = LANES / 2; d; d /= 2) {
        if constexpr (SUM) sum += __shfl_xor_sync(FULL, sum, d);
        if constexpr (TOP && LANES < WARP) top = absmax(top, __shfl_xor_sync(FULL, top, d));
    }
    if constexpr (TOP && LANES == WARP) top = warp_absmax(top);
}

// The absmax over the THREADS of a row, in all of them. THREADS is a power of two; rows of fewer threads than a warp
// share a warp. Consecutive reductions must alternate `bank`.
template <int THREADS, int N>
__device__ __forceinline__ float threads_absmax(float top, RowScratch<THREADS, N>& scratch, int bank) {
    double none = 0;
    lanes_sum_max<false, true, (THREADS < WARP ? THREADS : WARP)>(none, top);
    if constexpr (THREADS > WARP) {
        constexpr int WARPS = THREADS / WARP;
        if (threadIdx.x % WARP == 0) scratch.top[bank][threadIdx.x / WARP] = top;
        sync_threads<THREADS>();
        top = warp_absmax(scratch.top[bank][threadIdx.x % WARPS]);
    }
    return top;
}

// ---- the one order of a row's sums -------------------------------------------------------------------------------
//
// A row's sum is a function of the row alone: it has one order, whatever number of threads holds the row. Vectors of
// eight elements are numbered along the row. These are added, see docs/numerics.md:
//
//   1. the elements of a vector, one after another, in fp32; everything below in fp64
//   2. vectors that are 2,048 apart (in rows of more than 16,384 elements), one after another
//   3. the 32 vectors of a group, in a tree: vectors that are 16 apart, then 8, 4, 2, 1
//   4. the groups, in a tree: groups that are 32 apart, then 16, 8, 4, 2, 1
//
// Vectors beyond the end of the row are zeros. Adding zero changes no sum, so a tree needs no node for them.

constexpr int ROW_SUM_VECTORS = 2048;

// The tree over x[0], ..., x[N - 1]: those N / 2 apart first. x[0] gets the sum.
template <int N>
__device__ __forceinline__ void tree_sum(double (&x)[N]) {
#pragma unroll
    for (int half = N / 2; half; half /= 2)
#pragma unroll
        for (int i = 0; i < half; ++i) x[i] += x[i + half];
}

// Step 3 for N groups at once, and with TOP the absmax over the warp. x[i]: this lane's vector of group i. In lane t,
// x[0] gets the sum of group t / (WARP / N). Lanes that exchange values keep one half of the groups each, so N groups
// take N - 1 exchanges more than log2(WARP / N), not N log2(WARP). HALVES: in lane 2 m + 1 x[i] is the sum of vectors m
// and m + 16, and lanes with odd numbers get the sums.
template <bool TOP, bool HALVES, int N>
__device__ __forceinline__ void sum_groups(double (&x)[N], float& top) {
    int groups = N;
#pragma unroll
    for (int d = WARP / 2; d > HALVES; d /= 2) {
        if (groups > 1) {
            const bool upper = threadIdx.x & d;
            groups /= 2;
#pragma unroll
            for (int i = 0; i < groups; ++i) {
                const double kept = upper ? x[i + groups] : x[i], sent = upper ? x[i] : x[i + groups];
                x[i] = kept + __shfl_xor_sync(FULL, sent, d);
            }
        } else {
            x[0] += __shfl_xor_sync(FULL, x[0], d);
        }
    }
    if constexpr (TOP) top = warp_absmax(top);
}

// Steps 3 and 4, and with TOP the absmax, over the THREADS of a row, in all of them: sum[0] and top. sum[i]: the sum of
// vector i of this thread, which is vector i * THREADS + thread of the row, after step 2. THREADS and N are powers of
// two; rows of fewer threads than a warp have one group. Consecutive reductions must alternate `bank`. HALVES: see
// sum_groups.
template <int THREADS, bool TOP, bool HALVES = false, int N>
__device__ __forceinline__ void row_sum_max(double (&sum)[N], float& top, RowScratch<THREADS, N>& scratch, int bank) {
    static_assert(N * THREADS <= (THREADS < WARP ? WARP : ROW_SUM_VECTORS), "one sum for each vector of the order");
    static_assert(!HALVES || THREADS > WARP, "the warps exchange sums");
    const int lane = threadIdx.x % WARP;
    if constexpr (THREADS < WARP) {
        tree_sum(sum);
        lanes_sum_max<true, TOP, THREADS>(sum[0], top);
        return;
    }
    sum_groups<TOP, HALVES>(sum, top);
    constexpr int WARPS = THREADS / WARP, GROUPS = N * WARPS;
    if constexpr (WARPS == 1) {
#pragma unroll
        for (int d = WARP / 2; d >= WARP / N; d /= 2) sum[0] += __shfl_xor_sync(FULL, sum[0], d);
    } else {
        // Groups of a lane. Where the latency of one row counts, reads take less time than exchanges.
        constexpr int EACH = HALVES ? 4 : GROUPS > WARP ? GROUPS / WARP : 1, LANES = GROUPS / EACH;
        static_assert(!HALVES || EACH <= GROUPS, "a lane adds up some of the groups");
        const int warp = threadIdx.x / WARP;
        if (lane % (WARP / N) == HALVES) scratch.sum[bank][lane / (WARP / N) * WARPS + warp] = sum[0];
        if (TOP && lane == 0) scratch.top[bank][warp] = top;
        sync_threads<THREADS>();
        double group[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) group[i] = scratch.sum[bank][i * LANES + lane % LANES];
        if constexpr (TOP) top = warp_absmax(scratch.top[bank][lane % WARPS]);
        tree_sum(group);
#pragma unroll
        for (int d = LANES / 2; d; d /= 2) group[0] += __shfl_xor_sync(FULL, group[0], d);
        sum[0] = group[0];
    }
}

// ---- a row in registers: vector i of thread t holds the elements 8 (i THREADS + t) to 8 (i THREADS + t) + 7 ------

// The minimum of resident blocks per SM for __launch_bounds__: with fewer threads, too few loads are in flight.
constexpr int resident_blocks(int threads, int vectors) {
    if (vectors != 4) return 1;
    return threads <= 128 ? 6 : threads == 256 ? 3 : 2;
}

// Clears the elements in columns from k on; x[0] is in `column`.
__device__ __forceinline__ void zero_tail(float (&x)[8], int column, int k) {
    if (column + 8 > k)
#pragma unroll
        for (int j = 0; j < 8; ++j)
            if (column + j >= k) x[j] = 0;
}

// The same of eight fp16 or bf16 elements.
__device__ __forceinline__ void zero_tail(uint4& x, int column, int k) {
    if (column + 8 <= k) return;
    unsigned (&pairs)[4] = reinterpret_cast<unsigned (&)[4]>(x);
#pragma unroll
    for (int j = 0; j < 4; ++j)
        pairs[j] = column + 2 * j >= k ? 0 : column + 2 * j + 1 >= k ? pairs[j] & 0xffffu : pairs[j];
}

// Eight elements from `column` on, and zeros in columns from k on.
template <class Source>
__device__ __forceinline__ void load_row8(const Source* row, int column, int k, int pitch, float (&x)[8]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = 0;
    if (column >= pitch) return;
    load8(row + column, x);
    zero_tail(x, column, k);
}

// The absmax of a row.
template <int THREADS, int VECTORS, int N>
__device__ __forceinline__ float row_max(const float (&v)[VECTORS][8], RowScratch<THREADS, N>& scratch, int bank = 0) {
    float top = 0;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) top = absmax(top, v[i][j]);
    return threads_absmax<THREADS>(top, scratch, bank);
}

// Which elements of a row a thread has: vector i of eight, of neighbours.
template <int ROW_THREADS>
struct WholeVectors {
    static constexpr int THREADS = ROW_THREADS;
    static constexpr bool HALVES = false;

    __device__ __forceinline__ static bool has_part() { return true; }
    __device__ __forceinline__ static int column(int i, int half = 0) {
        const int thread = threadIdx.x;
        return (i * THREADS + thread % THREADS) * 8 + half * 4;
    }
};

// Halves of two vectors in place of vector i, for the only row of a block, held by its first ROW_THREADS threads. Lane
// 2 m of a warp has the first halves of the vectors that lanes m and m + 16 have in WholeVectors, lane 2 m + 1 the
// second ones. So a warp's loads of fp32 vectors take whole sectors: loads of 16 bytes, 32 bytes apart, take each
// sector twice.
template <int ROW_THREADS>
struct HalfVectors {
    static constexpr int THREADS = ROW_THREADS;
    static constexpr bool HALVES = true;

    __device__ __forceinline__ static bool has_part() { return threadIdx.x < THREADS; }
    __device__ __forceinline__ static int column(int i, int half) {
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
        return (i * THREADS + warp * WARP) * 8 + half * WARP * 4 + lane * 4;
    }
};

// Clears the elements of vector i in columns from k on.
template <class Layout>
__device__ __forceinline__ void clear_tail(float (&x)[8], int i, int k) {
    if constexpr (Layout::HALVES) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (Layout::column(i, half) + j >= k) x[4 * half + j] = 0;
    } else {
        zero_tail(x, Layout::column(i), k);
    }
}

// Step 1: folds add(sum, element) over a vector, from 0 on. Of HALVES a lane with an even number sums its first halves,
// and the lane behind it goes on; there the result is the sum of both vectors, which are 16 apart.
template <class Layout, class F>
__device__ __forceinline__ double vector_sum(const float (&v)[8], F add) {
    if constexpr (!Layout::HALVES) {
        float part = 0;
#pragma unroll
        for (int j = 0; j < 8; ++j) part = add(part, v[j]);
        return part;
    } else {
        float part[2] = {};
#pragma unroll
        for (int round = 0; round < 2; ++round) {
            if (round == 1)
#pragma unroll
                for (int half = 0; half < 2; ++half) part[half] = __shfl_up_sync(FULL, part[half], 1);
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int half = 0; half < 2; ++half) part[half] = add(part[half], v[4 * half + j]);
        }
        return static_cast<double>(part[0]) + part[1];
    }
}

// The norm of rows, as normalise_row takes it: weight and bias (null: none), fp32 [pitch], are read from memory when
// they are needed.
template <class RowLayout>
struct NormParams {
    using Layout = RowLayout;
    const float* __restrict__ weight;
    const float* __restrict__ bias;
    float eps;
    int k, pitch;

    __device__ __forceinline__ double inverse_k() const { return 1.0 / k; }
    __device__ __forceinline__ bool has_bias() const { return bias != nullptr; }
    __device__ __forceinline__ void load_weight(int i, float (&x)[8]) const { load(weight, i, x); }
    __device__ __forceinline__ void load_bias(int i, float (&x)[8]) const { load(bias, i, x); }

private:
    __device__ __forceinline__ void load(const float* row, int i, float (&x)[8]) const {
        if constexpr (Layout::HALVES) {
            float4 halves[2] = {};
#pragma unroll
            for (int half = 0; half < 2; ++half)
                if (const int column = Layout::column(i, half); column < pitch)
                    halves[half] = *reinterpret_cast<const float4*>(row + column);
            load8(reinterpret_cast<const float*>(halves), x);
            clear_tail<Layout>(x, i, k);
        } else {
            load_row8(row, Layout::column(i), k, pitch, x);
        }
    }
};

// The same, with the weight, and the bias if WITH_BIAS, in registers. Made before a kernel waits for its input, it
// takes their latency off the time that the input takes. Behind the end of the row they are finite. inverse: 1 / k.
template <int VECTORS, bool WITH_BIAS, class Params>
struct LoadedNorm : Params {
    using Layout = typename Params::Layout;
    double inverse;
    float weights[VECTORS][8], biases[WITH_BIAS ? VECTORS : 1][8];

    __device__ __forceinline__ LoadedNorm(const Params& params, double inverse) : Params(params), inverse(inverse) {
        load(params.weight, weights);
        if constexpr (WITH_BIAS)
            if (params.bias) load(params.bias, biases);
    }
    __device__ __forceinline__ double inverse_k() const { return inverse; }
    __device__ __forceinline__ void load_weight(int i, float (&x)[8]) const {
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] = weights[i][j];
    }
    __device__ __forceinline__ void load_bias(int i, float (&x)[8]) const {
        if constexpr (!WITH_BIAS) return Params::load_bias(i, x);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] = biases[i][j];
    }

private:
    // Threads beyond the end of the row load its last elements, and keep them: clearing them would wait for the load.
    __device__ __forceinline__ int last_or(int column, int half) const {
        return min(column, this->pitch - (Layout::HALVES ? 4 : 8 - 4 * half));
    }
    __device__ __forceinline__ void load(const float* row, float (&x)[VECTORS][8]) const {
        if (!Layout::has_part()) return;  // loads that are not needed delay the others: all blocks load at once
        uint4 raw[VECTORS][2];
#pragma unroll
        for (int i = 0; i < VECTORS; ++i)
#pragma unroll
            for (int j = 0; j < 2; ++j) raw[i][j] = ld_global_cg_v4(row + last_or(Layout::column(i, j), j));
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) load8(reinterpret_cast<const float*>(raw[i]), x[i]);
    }
};

// RMSNorm, or with CENTER LayerNorm, of a row in place, in fp32:
//     y = (x - mean) * norm_weight / sqrt(mean((x - mean)^2) + eps) + norm_bias, where RMSNorm has mean = 0.
// With TOP it returns the absmax of the result. Without a bias that is max|(x - mean) norm_weight| times the inverse
// deviation, because rounding is monotonic; so one reduction yields both the sum of squares and the maximum.
template <int THREADS, bool CENTER, bool TOP, int VECTORS, class Params>
__device__ __forceinline__ float normalise_row(
    float (&v)[VECTORS][8], const Params& norm, RowScratch<THREADS, VECTORS>& scratch) {
    const double inverse_k = norm.inverse_k();  // computed while the loads of the row are in flight
    using Layout = typename Params::Layout;
    float top = 0;
    double sum[VECTORS];
    if constexpr (CENTER) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i)
            sum[i] = vector_sum<Layout>(v[i], [](float part, float x) { return part + x; });
        row_sum_max<THREADS, false, Layout::HALVES>(sum, top, scratch, 1);
        const float mean = static_cast<float>(sum[0] * inverse_k);
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
#pragma unroll
            for (int j = 0; j < 8; ++j) v[i][j] -= mean;
            if (norm.k < THREADS * VECTORS * 8) clear_tail<Layout>(v[i], i, norm.k);
        }
    }
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        float weight[8];
        norm.load_weight(i, weight);
        sum[i] = vector_sum<Layout>(v[i], [](float part, float x) { return fmaf(x, x, part); });
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            v[i][j] = __fmul_rn(v[i][j], weight[j]);
            if constexpr (TOP) top = absmax(top, v[i][j]);
        }
    }
    row_sum_max<THREADS, TOP, Layout::HALVES>(sum, top, scratch, 0);
    const float inverse = __fdiv_rn(1.0f, __fsqrt_rn(static_cast<float>(sum[0] * inverse_k) + norm.eps));
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) v[i][j] = __fmul_rn(v[i][j], inverse);
    if (!norm.has_bias()) return __fmul_rn(top, inverse);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        float bias[8];
        norm.load_bias(i, bias);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[i][j] = __fadd_rn(v[i][j], bias[j]);
        if (norm.k < THREADS * VECTORS * 8) clear_tail<Layout>(v[i], i, norm.k);
    }
    return TOP ? row_max<THREADS>(v, scratch, 1) : 0.0f;
}

// The same with a weight and a bias that are read from memory.
template <int THREADS, bool CENTER, bool TOP, int VECTORS>
__device__ __forceinline__ float normalise_row(
    float (&v)[VECTORS][8], const float* __restrict__ norm_weight, const float* __restrict__ norm_bias, float eps,
    int k, int pitch, RowScratch<THREADS, VECTORS>& scratch) {
    const NormParams<WholeVectors<THREADS>> norm = {norm_weight, norm_bias, eps, k, pitch};
    return normalise_row<THREADS, CENTER, TOP>(v, norm, scratch);
}

// ---- int8 quantization of a row ----------------------------------------------------------------------------------

// For a row with absmax a: codes = clip(rint(x * ratio), -127, 127) with ratio = 127 / a, and scale = a / 127.
// If a is NaN or infinite: scale NaN, ratio 0. If a is 0 or so small that 127 / a overflows: both 0.
struct RowScale {
    float ratio, scale;
};

__device__ __forceinline__ RowScale row_scale(float a) {
    const float ratio = __fdiv_rn(127.0f, a);
    if (!(a < INF_F)) return {0.0f, NAN_F};
    if (!(ratio < INF_F)) return {0.0f, 0.0f};
    return {ratio, __fdiv_rn(a, 127.0f)};
}

// The ratio alone.
__device__ __forceinline__ float row_ratio(float a) {
    const float ratio = __fdiv_rn(127.0f, a);
    return a < INF_F && ratio < INF_F ? ratio : 0.0f;
}

// Eight codes. Adding 1.5 * 2^23 rounds half to even and leaves the integer in the low byte of the sum. No clipping is
// needed: |x * ratio| rounds to at most 127, because a * ratio does.
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

// The value of an int32 sum of products of codes, each operation rounded on its own. Callers add a bias to it.
__device__ __forceinline__ float scaled(float acc, float x_scale, float w_scale) {
    return __fmul_rn(x_scale, __fmul_rn(w_scale, acc));
}

// ---- activation functions, in fp32 -------------------------------------------------------------------------------

// x times the normal distribution's function: max(x, 0) - |x| P(N > |x|). The logarithm of that probability is smooth,
// here a fit up to 6, from where on the product is less than fp16 has. Relative error 2^-20; callers round to fp16.
__device__ __forceinline__ float exact_gelu(float x) {
    const float magnitude = fabsf(x), t = fminf(magnitude, 6.0f);
    float y = -0x1.a73426p-27f;
    y = __fmaf_rn(y, t, 0x1.bd3d42p-22f);
    y = __fmaf_rn(y, t, -0x1.8e841cp-18f);
    y = __fmaf_rn(y, t, 0x1.7bc66p-15f);
    y = __fmaf_rn(y, t, -0x1.587214p-13f);
    y = __fmaf_rn(y, t, -0x1.116286p-12f);
    y = __fmaf_rn(y, t, 0x1.de698ep-8f);
    y = __fmaf_rn(y, t, -0x1.afd06ap-5f);
    y = __fmaf_rn(y, t, -0x1.d622d4p-2f);
    y = __fmaf_rn(y, t, -0x1.26afc2p+0f);
    y = __fmaf_rn(y, t, -0x1.fffff4p-1f);
    const float positive = __fmaf_rn(0.5f, magnitude, __fmul_rn(0.5f, x));  // NaN for NaN and -inf, as is x P(N < x)
    return __fmaf_rn(-t, exp2_fast(y), positive);
}

// F is an Activation. The intrinsics keep the compiler from contracting a product and a sum in one kernel and not in
// another.
template <int F>
__device__ __forceinline__ float activate(float x) {
    if constexpr (F == SILU) {  // relative error 2^-20; callers round to fp16
        // An exponential that would be subnormal is 0, which changes no sum with 1 and saves half of the instructions.
        const float y = exp2_fast(__fmul_rn(-1.4426950408889634f, x));
        return __fmul_rn(x, reciprocal_fast(__fadd_rn(1.0f, y)));
    }
    if constexpr (F == GELU_TANH) {  // (1 + tanh(y)) / 2 = 1 / (1 + exp(-2 y)), which loses no digits where y is
                                     // negative
        const float cube = __fmul_rn(__fmul_rn(__fmul_rn(0.044715f, x), x), x);
        const float y = __fmul_rn(0.7978845608028654f, __fadd_rn(x, cube));
        return __fdividef(x, __fadd_rn(1.0f, __expf(__fmul_rn(-2.0f, y))));
    }
    if constexpr (F == GELU) return exact_gelu(x);
    const float positive = max_or_nan(x, 0.0f);
    return F == RELU_SQUARED ? __fmul_rn(positive, positive) : positive;
}

// f(gate) * up, the output of a gated feed-forward layer; both products are rounded to fp16 first.
template <int F>
__device__ __forceinline__ float gated(float gate, float up) {
    return __fmul_rn(activate<F>(rounded(gate)), rounded(up));
}

}  // namespace bminf

// One activation row times an int8 weight matrix: what decoding at batch 1 is made of, bound by reading the weights.
//
// Every block finds the input row itself (a norm of the residual stream, or fp16), quantizes it into shared memory and
// multiplies its share of the weight's rows. The share is cut into units, U chunks of 512 bytes of one row, that the
// block's warps take in turn whatever rows they belong to: int32 sums are exact in any order, so the work divides
// evenly and the result is always the same. The first units are under way before the kernel waits for its input.
#include "common/async.cuh"
#include "common/common.cuh"
#include "constants/epilogue.cuh"
#include "constants/gemv.cuh"

using namespace bminf;

constexpr int WARPS = THREADS / WARP;
constexpr int PIPELINE_BYTES =
    PIPELINE_CHUNKS * CHUNK;  // bytes under way per warp; a multiple of 4 chunks, as shared memory allows

__device__ __forceinline__ int dot16(const int4& a, const int4& b, int acc) {
    acc = __dp4a(a.x, b.x, acc);
    acc = __dp4a(a.y, b.y, acc);
    acc = __dp4a(a.z, b.z, acc);
    return __dp4a(a.w, b.w, acc);
}

// A thread's part of a unit times the codes from the unit's first column on. Behind the end of a row the codes are
// zero, so what the weights are there does not matter, and all loads are under way at once.
template <int U>
__device__ __forceinline__ int dot_unit(const int4 (&w)[U], const int8* codes) {
    int4 c[U];
#pragma unroll
    for (int i = 0; i < U; ++i) c[i] = *reinterpret_cast<const int4*>(codes + threadIdx.x % WARP * 16 + i * CHUNK);
    int sum = 0;
#pragma unroll
    for (int i = 0; i < U; ++i) sum += dot16(w[i], c[i], 0);
    return sum;
}

__device__ __forceinline__ int warp_sum(int x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_add_sync(FULL, x);
#else
    for (int d = WARP / 2; d; d /= 2) x += __shfl_xor_sync(FULL, x, d);
    return x;
#endif
}

// The input row, VECTORS of eight elements per thread, which cover the pitch. All loads are under way at once: behind a
// condition, one would begin when the one before has ended. Threads behind the end of the row load its last elements.
template <class Source, int VECTORS>
__device__ __forceinline__ void load_input(const Source* x, int k, int pitch, float (&v)[VECTORS][8]) {
    constexpr int PARTS = sizeof(Source) / 2;
    uint4 raw[VECTORS][PARTS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
#pragma unroll
        for (int j = 0; j < PARTS; ++j)
            raw[i][j] =
                ld_global_v4(x + min((i * THREADS + static_cast<int>(threadIdx.x)) * 8, pitch - 8) + j * (8 / PARTS));
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        load8(reinterpret_cast<const Source*>(raw[i]), v[i]);
        zero_tail(v[i], (i * THREADS + threadIdx.x) * 8, k);
    }
}

// The input row as codes in shared memory, with zeros up to `width`; returns its scale.
template <int INPUT, int VECTORS>
__device__ __forceinline__ float quantize_input(
    const void* x, const float* norm_weight, const float* norm_bias, float eps, int k, int pitch, int width,
    int8* codes) {
    using Source = typename Conditional<INPUT == HALF, __half, float>::type;
    __shared__ RowScratch<THREADS> scratch;
    float v[VECTORS][8];
    load_input(static_cast<const Source*>(x), k, pitch, v);
    const float top = INPUT == HALF ? row_max<THREADS>(v, scratch)
                                    : normalise_row<THREADS, INPUT == LAYER_NORM, true>(
                                          v, norm_weight, norm_bias, eps, k, pitch, scratch);
    const RowScale s = row_scale(top);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int column = (i * THREADS + threadIdx.x) * 8;
        if (column < width) *reinterpret_cast<uint2*>(codes + column) = quantize8(v[i], s.ratio);
    }
    return s.scale;
}

// The part of the product that a block computes: `count` outputs from `first` on. With GATED each has two rows.
template <int EPILOGUE>
struct BlockRange {
    static constexpr int MATRICES = EPILOGUE == GATED ? 2 : 1;
    int outputs, first, count;

    __device__ __forceinline__ explicit BlockRange(int n) {
        outputs = n / MATRICES;
        first = static_cast<int>(static_cast<long long>(outputs) * blockIdx.x / gridDim.x);
        count = static_cast<int>(static_cast<long long>(outputs) * (blockIdx.x + 1) / gridDim.x) - first;
    }
    __device__ __forceinline__ int rows() const { return count * MATRICES; }
    __device__ __forceinline__ int row(int local) const {  // the weight's row of a local one
        return MATRICES == 2 && local >= count ? outputs + first + local - count : first + local;
    }
};

// The units that one warp takes: every WARPS-th of the block's.
struct WarpUnits {
    int row, segment, segments, rows_on, segments_on, left;

    __device__ __forceinline__ WarpUnits(int warp, int rows, int segments_) : segments(segments_) {
        row = warp / segments, segment = warp % segments;
        rows_on = WARPS / segments, segments_on = WARPS % segments;
        const int total = rows * segments;
        left = total > warp ? (total - warp + WARPS - 1) / WARPS : 0;
    }
    __device__ __forceinline__ void next() {
        row += rows_on, segment += segments_on, --left;
        if (segment >= segments) segment -= segments, ++row;
    }
};

// What a thread adds to its first output or multiplies it by, fetched while the product is under way.
struct EpilogueOperands {
    float w_scale[2], bias[2], residual;
};

template <int EPILOGUE>
__device__ __forceinline__ EpilogueOperands prefetch_epilogue(
    const BlockRange<EPILOGUE>& share, const float* __restrict__ w_scale, const float* __restrict__ bias,
    const void* out) {
    EpilogueOperands e = {};
    if (threadIdx.x < share.count) {
#pragma unroll
        for (int m = 0; m < share.MATRICES; ++m) {
            const int row = share.first + threadIdx.x + m * share.outputs;
            e.w_scale[m] = w_scale[row];
            e.bias[m] = bias ? bias[row] : 0.0f;
        }
        if constexpr (EPILOGUE == ADD) e.residual = static_cast<const float*>(out)[share.first + threadIdx.x];
    }
    return e;
}

// The exact sums of a block's rows, scaled and put where they belong.
template <int EPILOGUE, int F>
__device__ __forceinline__ void epilogue(
    const int* acc, float x_scale, const BlockRange<EPILOGUE>& share, EpilogueOperands e,
    const float* __restrict__ w_scale, const float* __restrict__ bias, void* out) {
    for (int i = threadIdx.x; i < share.count; i += THREADS) {
        const int to = share.first + i;
        if (i >= THREADS) {
#pragma unroll
            for (int m = 0; m < share.MATRICES; ++m) {
                e.w_scale[m] = w_scale[to + m * share.outputs];
                e.bias[m] = bias ? bias[to + m * share.outputs] : 0.0f;
            }
            if constexpr (EPILOGUE == ADD) e.residual = static_cast<const float*>(out)[to];
        }
        const float y = __fadd_rn(scaled(__int2float_rn(acc[i]), x_scale, e.w_scale[0]), e.bias[0]);
        if constexpr (EPILOGUE == TO_HALF) static_cast<__half*>(out)[to] = __float2half_rn(y);
        if constexpr (EPILOGUE == TO_FLOAT) static_cast<float*>(out)[to] = y;
        if constexpr (EPILOGUE == ACTIVATED) static_cast<__half*>(out)[to] = __float2half_rn(activate<F>(rounded(y)));
        if constexpr (EPILOGUE == ADD) static_cast<float*>(out)[to] = __fadd_rn(e.residual, rounded(y));
        if constexpr (EPILOGUE == GATED) {
            const float up = __fadd_rn(scaled(__int2float_rn(acc[share.count + i]), x_scale, e.w_scale[1]), e.bias[1]);
            static_cast<__half*>(out)[to] = __float2half_rn(activate<F>(rounded(y)) * rounded(up));
        }
    }
}

// A warp's units on their way to it: by the bulk copy engine into shared memory on Hopper, into registers before.
#if __CUDA_ARCH__ >= 900
template <int U, class BlockRange>
struct WeightStream {
    static constexpr int STAGES = PIPELINE_BYTES / (U * CHUNK);
    const int8* weight;
    const BlockRange& share;
    int pitch, lane;
    unsigned data, barriers;
    WarpUnits ahead;
    int stage = 0, phase = 0;

    __device__ __forceinline__
    WeightStream(const int8* weight, const BlockRange& share, int pitch, char* pipeline, unsigned long long* all)
        : weight(weight),
          share(share),
          pitch(pitch),
          lane(threadIdx.x % WARP),
          ahead(threadIdx.x / WARP, share.rows(), (pitch + U * CHUNK - 1) / (U * CHUNK)) {
        const int warp = threadIdx.x / WARP;
        data = cast_smem_ptr_to_uint(pipeline + warp * PIPELINE_BYTES);
        barriers = cast_smem_ptr_to_uint(all + warp * STAGES);
        if (lane == 0) {
            for (int i = 0; i < STAGES; ++i) mbarrier_init(barriers + 8 * i, 1);
            fence_mbarrier_init();
        }
        __syncwarp();
        for (int i = 0; i < STAGES; ++i) start(i);
    }
    __device__ __forceinline__ void start(int to) {
        if (ahead.left <= 0) return;
        if (lane == 0) {
            const int column = ahead.segment * (U * CHUNK), bytes = min(U * CHUNK, pitch - column);
            const int8* source = weight + static_cast<size_t>(share.row(ahead.row)) * pitch + column;
            mbarrier_arrive_expect_tx(barriers + 8 * to, bytes);
            cp_async_bulk(data + to * (U * CHUNK), source, bytes, barriers + 8 * to);
        }
        ahead.next();
    }
    __device__ __forceinline__ int multiply(const int8* codes) {
        mbarrier_wait(barriers + 8 * stage, phase);
        int4 w[U];
        const unsigned from = data + stage * (U * CHUNK) + lane * 16;
#pragma unroll
        for (int i = 0; i < U; ++i)
            asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(w[i].x), "=r"(w[i].y), "=r"(w[i].z), "=r"(w[i].w)
                         : "r"(from + i * CHUNK));
        const int sum = dot_unit<U>(w, codes);
        __syncwarp();
        start(stage);
        if (++stage == STAGES) stage = 0, phase ^= 1;
        return warp_sum(sum);
    }
};
#else
template <int U, class BlockRange>
struct WeightStream {
    static constexpr int STAGES = 1;
    const int8* weight;
    const BlockRange& share;
    int pitch;
    WarpUnits ahead;
    int4 next[U];

    __device__ __forceinline__
    WeightStream(const int8* weight, const BlockRange& share, int pitch, char*, unsigned long long*)
        : weight(weight),
          share(share),
          pitch(pitch),
          ahead(threadIdx.x / WARP, share.rows(), (pitch + U * CHUNK - 1) / (U * CHUNK)) {
        start();
    }
    __device__ __forceinline__ void start() {
        if (ahead.left <= 0) return;
        const int column = ahead.segment * (U * CHUNK) + threadIdx.x % WARP * 16;
        const int8* source = weight + static_cast<size_t>(share.row(ahead.row)) * pitch + column;
#pragma unroll
        for (int i = 0; i < U; ++i)
            next[i] = column + i * CHUNK < pitch ? __ldcs(reinterpret_cast<const int4*>(source + i * CHUNK)) : int4{};
        ahead.next();
    }
    __device__ __forceinline__ int multiply(const int8* codes) {
        int4 w[U];
#pragma unroll
        for (int i = 0; i < U; ++i) w[i] = next[i];
        start();
        return warp_sum(dot_unit<U>(w, codes));
    }
};
#endif

// x: the input row, fp16 or fp32 [k]; norm_weight, norm_bias: the norm's [k]. weight: int8 [n, pitch]; w_scale, bias:
// fp32 [n]. out: [n], or [n / 2] if GATED. F is the gate's function, or the outputs'. Dynamic shared memory: the
// pipeline from 9.0 on, the codes (pitch bytes, rounded up to whole units), and an int32 for each row of a block's
// share.
template <int INPUT, int VECTORS, int EPILOGUE, int F, int U>
__global__ void __launch_bounds__(THREADS) gemv(
    const void* x, const float* norm_weight, const float* norm_bias, float eps, const int8* __restrict__ weight,
    const float* __restrict__ w_scale, const float* __restrict__ bias, void* out, int n, int k, int pitch) {
    extern __shared__ __align__(128) char shared[];
    launch_dependent_grids();
    const BlockRange<EPILOGUE> share(n);
    using Stream_ = WeightStream<U, BlockRange<EPILOGUE>>;
    __shared__ __align__(8) unsigned long long barriers[WARPS * Stream_::STAGES];
#if __CUDA_ARCH__ >= 900
    int8* codes = reinterpret_cast<int8*>(shared + WARPS * PIPELINE_BYTES);
#else
    int8* codes = reinterpret_cast<int8*>(shared);
#endif
    const int width = (pitch + U * CHUNK - 1) / (U * CHUNK) * (U * CHUNK);
    int* acc = reinterpret_cast<int*>(codes + width);
    Stream_ stream(weight, share, pitch, shared, barriers);
    for (int i = threadIdx.x; i < share.rows(); i += THREADS) acc[i] = 0;
    wait_on_dependent_grids();
    const float x_scale = quantize_input<INPUT, VECTORS>(x, norm_weight, norm_bias, eps, k, pitch, width, codes);
    const EpilogueOperands early = prefetch_epilogue<EPILOGUE>(share, w_scale, bias, out);
    sync_threads<THREADS>();
    for (WarpUnits unit(threadIdx.x / WARP, share.rows(), (pitch + U * CHUNK - 1) / (U * CHUNK)); unit.left > 0;
         unit.next()) {
        const int sum = stream.multiply(codes + unit.segment * (U * CHUNK));
        if (threadIdx.x % WARP == 0) atomicAdd(acc + unit.row, sum);
    }
    sync_threads<THREADS>();
    epilogue<EPILOGUE, F>(acc, x_scale, share, early, w_scale, bias, out);
}

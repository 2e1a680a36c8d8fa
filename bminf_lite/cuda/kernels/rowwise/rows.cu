// The row kernels between two GEMMs. `transform` does in one pass over a row of each token what separate kernels would
// do in several: it dequantizes an int32 product, adds it to the residual stream, normalises or gates it, and quantizes
// the result for the next product:
//
//     residual += x;  out = quantize(norm(residual))   (norms)
//     out = quantize(f(gate) * up)                     (gates: x = [gate, up])
//     out = quantize(f(x))                             (activations)
//     out = quantize(x)                                (identity)
//
// or writes fp16 or fp32 instead of codes, or adds a norm to fp32 values. Values may be rotated before they are
// quantized or rounded to fp16. A row is held in registers by THREADS threads, VECTORS vectors of eight elements each,
// so that it is read and written once. Rows of few threads share a block. The other kernels here are the embedding,
// norms of queries and keys, a gather of rows, and conversions.
#include "common/async.cuh"
#include "common/common.cuh"
#include "common/counters.cuh"
#include "common/layout.cuh"
#include "common/rotation.cuh"
#include "common/values.cuh"
#include "constants/rows.cuh"

using namespace bminf;

// Eight elements of x as they are in memory. All of a thread's elements are fetched before any is converted, so that
// their loads are in flight together. Threads beyond the end of a row fetch its first elements, which are cleared
// later.
template <int SOURCE>
struct Raw {
    uint4 part[SOURCE >= FROM_FLOAT ? 2 : 1];

    template <Order ORDER>
    __device__ __forceinline__ void fetch(const Values& v, int row, int column) {
        if constexpr (SOURCE == FROM_HALF)
            part[0] = ld_global_v4(static_cast<const __half*>(v.data) + row * v.pitch + column);
        if constexpr (SOURCE >= FROM_FLOAT) {
            const size_t index = SOURCE == FROM_INT32 ? offset<ORDER>(row, column, v.pitch) : row * v.pitch + column;
            part[0] = ld_global_v4(static_cast<const int*>(v.data) + index);
            part[1] = ld_global_v4(static_cast<const int*>(v.data) + index + 4);
        }
    }

    __device__ __forceinline__ void convert(const Values& v, float x_scale, int column, float (&x)[8]) const {
        if constexpr (SOURCE == FROM_HALF) load8(reinterpret_cast<const __half*>(part), x);
        if constexpr (SOURCE == FROM_FLOAT) load8(reinterpret_cast<const float*>(part), x);
        if constexpr (SOURCE == FROM_INT32) {
            float y[8];
            load8(reinterpret_cast<const int*>(part), x);
            load8(v.w_scale + column, y);
#pragma unroll
            for (int j = 0; j < 8; ++j) x[j] = scaled(x[j], x_scale, y[j]);
            if (v.bias) {
                load8(v.bias + column, y);
#pragma unroll
                for (int j = 0; j < 8; ++j) x[j] = __fadd_rn(x[j], y[j]);
            }
#pragma unroll
            for (int j = 0; j < 8; ++j) x[j] = rounded(x[j]);
        }
    }
};

// Eight elements of up, the second half of x, one by one: needed where up does not start at a multiple of 8.
template <int SOURCE, Order ORDER>
__device__ __forceinline__ void load_unaligned_up(const Values& v, int row, int column, int k, float (&x)[8]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const int c = k + column + j;
        x[j] = 0;
        if (column + j >= k) continue;
        x[j] = v.at<SOURCE == FROM_INT32, ORDER>(row, c);
    }
}

// A norm whose weight and bias are in registers if LOADED: one vector of each for a thread.
template <bool LOADED, bool CENTER, class Layout>
__device__ __forceinline__ auto norm_of(const NormParams<Layout>& params) {
    if constexpr (LOADED) {
        double inverse = 1.0 / params.k;
        asm volatile("" : "+d"(inverse));  // computed here
        return LoadedNorm<1, CENTER, NormParams<Layout>>(params, inverse);
    } else {
        return params;
    }
}

// The norm of a row in place, rotated if ROTATED. With TOP it returns the absmax of the result. Calls `normed` between.
template <int THREADS, bool CENTER, bool TOP, bool ROTATED, int VECTORS, class Norm, class F>
__device__ __forceinline__ float norm_and_rotate(
    float (&v)[VECTORS][8], const Norm& norm, int rotation, float rotation_scale, RowScratch<THREADS, VECTORS>& scratch,
    const F& normed) {
    const float top = normalise_row<THREADS, CENTER, (TOP && !ROTATED)>(v, norm, scratch);
    normed();
    if constexpr (!ROTATED) return top;
    rotate_in_layout<typename Norm::Layout>(v, rotation, rotation_scale);
    return TOP ? row_max<THREADS>(v, scratch, 1) : 0.0f;
}

// The codes of the norm of a row of which each of THREADS threads has one vector. stream: the row; padded: elements
// that it has in memory, and that the codes have. half_out: where the norm goes before it is rotated, if WITH_HALF.
template <Order OUT, bool CENTER, bool ROTATED, bool WITH_HALF, int THREADS, class Norm>
__device__ __forceinline__ void quantize_norm(
    const float* stream, __half* half_out, const Norm& norm, int padded, int row, int8* out, long long out_ld,
    float* scales, int rotation, float rotation_scale, RowScratch<THREADS, 1>& scratch) {
    using Layout = typename Norm::Layout;
    uint4 raw[2];
    float v[1][8];
#pragma unroll
    for (int half = 0; half < 2; ++half) raw[half] = ld_global_v4(stream + min(Layout::column(0, half), padded - 4));
    load8(reinterpret_cast<const float*>(raw), v[0]);
    clear_tail<Layout>(v[0], 0, norm.k);
    const auto normed = [&] {
        if constexpr (!WITH_HALF) return;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int column = Layout::column(0, half);
            const float* y = v[0] + 4 * half;
            if (column < padded)
                *reinterpret_cast<uint2*>(half_out + column) = {pack_half2(y[0], y[1]), pack_half2(y[2], y[3])};
        }
    };
    const RowScale s =
        row_scale(norm_and_rotate<THREADS, CENTER, true, ROTATED>(v, norm, rotation, rotation_scale, scratch, normed));
    if (threadIdx.x == 0) scales[row] = s.scale;
    const uint2 codes = quantize8(v[0], s.ratio);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int column = Layout::column(0, half);
        if (column < padded)
            *reinterpret_cast<unsigned*>(out + offset<OUT>(row, column, out_ld)) = half ? codes.y : codes.x;
    }
}

// Whether a row operation is an activation, not a gate.
constexpr bool is_activation(int prepare) { return prepare >= ACTIVATE_SILU; }

// Applies the activation of PREPARE, if it is one, to eight fp16 elements.
template <int PREPARE, class T>
__device__ __forceinline__ void activate8(T& x) {
    if constexpr (is_activation(PREPARE)) {
        float v[8];
        load8(reinterpret_cast<const __half*>(&x), v);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = activate<PREPARE - ACTIVATE_SILU>(v[j]);
        unsigned (&pairs)[4] = reinterpret_cast<unsigned (&)[4]>(x);
#pragma unroll
        for (int j = 0; j < 4; ++j) pairs[j] = pack_half2(v[2 * j], v[2 * j + 1]);
    }
}

// The codes of a row of fp16, activated as PREPARE says, of which each of THREADS threads has VECTORS vectors. Until
// they are quantized they stay in 16 bits, which takes half as many registers, so that more rows are in flight. padded:
// see quantize_norm. written: the same, or 0 for a row that does not exist.
template <Order OUT, int PREPARE, int THREADS, int VECTORS>
__device__ __forceinline__ void quantize_half(
    const __half* x, int k, int padded, int written, int row, int8* out, long long out_ld, float* scales,
    RowScratch<THREADS, 1>& scratch) {
    const auto column_of = [](int i) { return (i * THREADS + threadIdx.x % THREADS) * 8; };
    uint4 raw[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) raw[i] = ld_global_v4(x + min(column_of(i), padded - 8));
    unsigned top = 0;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        zero_tail(raw[i], column_of(i), k);
        activate8<PREPARE>(raw[i]);
        top = packed_max(top, raw[i]);
    }
    const float row_top = threads_absmax<THREADS>(larger_of(top), scratch, 0);
    if (threadIdx.x % THREADS == 0 && written) scales[row] = row_scale(row_top).scale;
    const float ratio = row_ratio(row_top);
    int first = threadIdx.x % THREADS * 8;
    asm volatile("" : "+r"(first));  // otherwise each vector's column stays in a register from the loads on
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int column = first + i * THREADS * 8;
        if (column >= written) continue;
        float v[8];
        load8(reinterpret_cast<const __half*>(&raw[i]), v);
        *reinterpret_cast<uint2*>(out + offset<OUT>(row, column, out_ld)) = quantize8(v, ratio);
    }
}

// The codes of rotated rows of fp16, activated as PREPARE says: of `row` and of every `stride`-th one behind it. Each
// of THREADS threads, a warp at least, has VECTORS neighbouring vectors of a row. padded: see quantize_half.
//
// A rotation takes about as long as the memory does, so a warp's part of the next row is copied to shared memory
// meanwhile. Neighbouring lanes copy neighbouring vectors, and where a vector lies is such that neither they nor the
// lanes that read their own vectors wait for each other.
template <Order OUT, int PREPARE, int THREADS, int VECTORS>
__device__ __forceinline__ void quantize_rotated_rows(
    const __half* x, long long pitch, int k, int padded, int row, int stride, int rows, int8* out, long long out_ld,
    float* scales, int rotation, float rotation_scale, RowScratch<THREADS, 1>& scratch) {
    __shared__ uint4 staged[(THREADS > 128 ? THREADS : 128) * VECTORS];
    const int thread = threadIdx.x % THREADS, lane = thread % WARP, first = thread * VECTORS * 8;
    uint4* own = staged + (static_cast<int>(threadIdx.x) - lane) * VECTORS;
    const auto place = [](int vector) { return vector ^ (vector / 8 % VECTORS); };
    const auto copy = [&](int from) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int vector = i * WARP + lane, column = ((thread - lane) * VECTORS + vector) * 8;
            cp_async_16_partial(
                cast_smem_ptr_to_uint(own + place(vector)), x + from * pitch + min(column, padded - 8),
                min(max(k - column, 0), 8) * 2);
        }
    };
    if (row < rows) copy(row);
    for (int bank = 0; row < rows; row += stride, bank ^= 1) {
        cp_async_wait_all();
        __syncwarp();
        uint4 raw[VECTORS];
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) raw[i] = own[place(lane * VECTORS + i)];
        __syncwarp();
        if (row + stride < rows) copy(row + stride);
        float v[VECTORS][8];
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            activate8<PREPARE>(raw[i]);
            load8(reinterpret_cast<const __half*>(&raw[i]), v[i]);
        }
        rotate_sums<8 * VECTORS, 1>(v, rotation);
        const float factor = scale_or_factor(v, rotation, rotation_scale);
        const RowScale s = row_scale(__fmul_rn(row_max<THREADS>(v, scratch, bank), factor));
        const float ratio = __fmul_rn(s.ratio, factor);
        if (thread == 0) scales[row] = s.scale;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i)
            if (const int column = first + 8 * i; column < padded)
                *reinterpret_cast<uint2*>(out + offset<OUT>(row, column, out_ld)) = quantize8(v[i], ratio);
    }
}

// Eight words of four codes, which begin in columns 32 apart from `column` on: those in columns below `written`, or all
// of them if `all`.
template <Order OUT>
__device__ __forceinline__ void store_words(
    int8* out, int row, int column, long long out_ld, int written, bool all, const unsigned (&words)[8]) {
    if (OUT == Order::ROW && all) {
        int8* const own = out + offset<OUT>(row, column, out_ld);
#pragma unroll
        for (int r = 0; r < 8; ++r) *reinterpret_cast<unsigned*>(own + r * 32) = words[r];
        return;
    }
#pragma unroll
    for (int r = 0; r < 8; ++r)
        if (const int own = column + r * 32; own < written)
            *reinterpret_cast<unsigned*>(out + offset<OUT>(row, own, out_ld)) = words[r];
}

// The same as quantize_rotated_rows through shared memory, of rows of which a thread has four vectors: `memory` has
// those of the next row, and behind them MOVED_VECTORS for each warp.
template <Order OUT, int PREPARE, int THREADS>
__device__ __forceinline__ void quantize_moved_rows(
    const __half* x, long long pitch, int k, int padded, int row, int stride, int rows, int8* out, long long out_ld,
    float* scales, int rotation, float rotation_scale, RowScratch<THREADS, 1>& scratch, uint4* memory) {
    constexpr int VECTORS = 4;
    const int thread = threadIdx.x % THREADS, lane = thread % WARP, warp = warp_index();
    const int first = warp % (THREADS / WARP) * WARP * VECTORS * 8;
    const unsigned own = cast_smem_ptr_to_uint(memory + warp * WARP * VECTORS);
    const unsigned moved = cast_smem_ptr_to_uint(memory + blockDim.x * VECTORS + warp * MOVED_VECTORS);
    const bool has_part = first < padded, all = first + WARP * VECTORS * 8 <= k;  // of the warp
    // Neighbouring lanes copy neighbouring vectors. They, and lanes that read their own, use different banks.
    const auto copy = [&](int from) {
        const __half* const source = x + from * pitch;
        const unsigned target = own + (lane ^ lane / 8) * 16;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int column = first + (i * WARP + lane) * 8;
            if (all)
                cp_async_16(target + i * WARP * 16, source + column);
            else
                cp_async_16_partial(
                    target + i * WARP * 16, source + min(column, padded - 8), min(max(k - column, 0), 8) * 2);
        }
    };
    if (has_part && row < rows) copy(row);
    for (int bank = 0; row < rows; row += stride, bank ^= 1) {
        float v[VECTORS][8], top[2] = {}, factor = 1;
        if (has_part) {
            int4 raw[VECTORS];
            cp_async_wait_all();
            __syncwarp();  // also: `moved` has been read
#pragma unroll
            for (int i = 0; i < VECTORS; ++i)
                raw[i] = ld_shared_v4(own + lane * VECTORS * 16 + (i ^ lane / 2 % VECTORS) * 16);
            __syncwarp();
            if (row + stride < rows) copy(row + stride);
#pragma unroll
            for (int i = 0; i < VECTORS; ++i) {
                activate8<PREPARE>(raw[i]);
                load8(reinterpret_cast<const __half*>(&raw[i]), v[i]);
            }
            rotate_moved(v, rotation, moved);
            factor = scale_or_factor(v, rotation, rotation_scale);
#pragma unroll
            for (int i = 0; i < VECTORS; ++i)
#pragma unroll
                for (int j = 0; j < 8; ++j) top[j % 2] = absmax(top[j % 2], v[i][j]);
        }
        const float row_top = threads_absmax<THREADS>(__fmul_rn(absmax(top[0], top[1]), factor), scratch, bank);
        const RowScale s = row_scale(row_top);
        if (thread == 0) scales[row] = s.scale;
        if (!has_part) continue;
        const float ratio = __fmul_rn(s.ratio, factor);
        unsigned words[8];
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const uint2 codes = quantize8(v[i], ratio);
            words[2 * i] = codes.x, words[2 * i + 1] = codes.y;
        }
        store_words<OUT>(out, row, first + moved_column(), out_ld, padded, all, words);
    }
}

// The codes of a norm, rotated through shared memory: v is a row as WholeVectors says. `memory` has TURNED fp32 values
// for each warp. written: see quantize_half.
template <Order OUT, int THREADS>
__device__ __forceinline__ void quantize_turned(
    float (&v)[4][8], int row, int written, int8* out, long long out_ld, float* scales, int rotation,
    float rotation_scale, RowScratch<THREADS, 4>& scratch, float* memory) {
    const int thread = threadIdx.x % THREADS, lane = thread % WARP;
    rotate_turned(v, rotation, rotation_scale, memory + threadIdx.x / WARP * TURNED);
    const RowScale s = row_scale(row_max<THREADS>(v, scratch, 1));
    if (thread == 0 && written) scales[row] = s.scale;
    unsigned words[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint2 codes = quantize8(v[i], s.ratio);
        words[2 * i] = turn_codes(codes.x), words[2 * i + 1] = turn_codes(codes.y);
    }
    const int first = (lane / 8 * THREADS + thread - lane) * 8 + lane % 4 * 8 + lane % 8 / 4 * 4;
    store_words<OUT>(out, row, first, out_ld, written, written == THREADS * 32, words);
}

// Up to this number of rows the norm's weight is prefetched to L2 before the kernel waits for its input, because the
// latency of that load counts, and the weight stream of the next GEMM delays it.
constexpr int PREFETCH_MAX_ROWS = 64;

// Whether `transform` does no more than activate and quantize fp16 rows: quantize_half.
constexpr bool is_half_to_codes(int source, int prepare, int target, int rotated) {
    return source == FROM_HALF && (prepare == IDENTITY || is_activation(prepare)) && target == CODES &&
           rotated == NOT_ROTATED;
}

// Whether it rotates them too, by quantize_rotated_rows or quantize_moved_rows: rows that fit the registers.
constexpr bool are_rotated_halves(int source, int prepare, int target, int threads, int vectors, int rotated) {
    return source == FROM_HALF && (prepare == IDENTITY || is_activation(prepare)) && target == CODES &&
           rotated != NOT_ROTATED && threads >= WARP && vectors <= 4;
}

// The minimum of resident blocks per SM of `transform`. Dequantization needs more registers, and so do norms of sums. A
// norm of 4,096 elements must not take more than 64: two waves of eight blocks normalise 2,048 rows. Rows of fp16 that
// become codes take 32, so an SM has 2,048 threads, and 48 if they are activated.
constexpr int blocks_of(int source, int prepare, int target, int threads, int vectors, int rotated) {
    if (is_half_to_codes(source, prepare, target, rotated) && vectors == 4)
        return (is_activation(prepare) ? 1280 : 2048) / (threads > 128 ? threads : 128);
    if (are_rotated_halves(source, prepare, target, threads, vectors, rotated))
        return 1024 / (threads > 128 ? threads : 128);
    if (source == FROM_INT32 || (target == CODES_AND_FLOAT && threads > 128)) return 1;
    const bool is_norm = (prepare == RMS_NORM || prepare == LAYER_NORM) && target != CODES_AND_FLOAT;
    return is_norm && threads == 128 && vectors == 4 ? 8 : resident_blocks(threads, vectors);
}

// data: x [rows, k], or [rows, 2 * k] for a gate, see Values, laid out by IN. residual: fp32 [rows, residual_pitch],
// read by norms, and written if there is an x. out: int8 codes laid out by OUT with leading dimension out_ld, and their
// scales, fp32 [rows]; or fp16 or fp32 with rows of out_ld elements, which may be the residual stream or, without a
// gate, x itself. With CODES_AND_HALF there is no x, `data` is where the fp16 goes, and x_scale null or a counter, an
// int to which 1 is added when a row is written. With CODES_AND_FLOAT residual is only read, and `x_scale` is where the
// norm in fp32 goes, in rows of residual_pitch. rotation, rotation_scale: those of rotate_row, unless NOT_ROTATED; at
// most 8 * min(THREADS, 32) elements. For ADD_TO_FLOAT rotation_scale is a factor on the sums. A block has max(THREADS,
// 128) threads. Dynamic shared memory: with IN_MEMORY, where VECTORS is 4, what quantize_moved_rows or quantize_turned
// needs.
template <int SOURCE, int PREPARE, int TARGET, int THREADS, int VECTORS, int IN, int OUT, int ROTATED>
__global__ void __launch_bounds__(
    THREADS > 128 ? THREADS : 128, blocks_of(SOURCE, PREPARE, TARGET, THREADS, VECTORS, ROTATED))
    transform(
        const void* data, const float* x_scale, const float* w_scale, const float* bias, long long pitch,
        float* residual, long long residual_pitch, const float* norm_weight, const float* norm_bias, float eps,
        void* out, float* scales, long long out_ld, int rows, int k, int rotation, float rotation_scale) {
    constexpr bool NORM = PREPARE == RMS_NORM || PREPARE == LAYER_NORM,
                   GATE = PREPARE >= GATE_SILU && PREPARE < ACTIVATE_SILU;
    constexpr bool LOADED = NORM && VECTORS == 1 && THREADS >= 128;  // with fewer threads there are many rows
    constexpr bool WITH_HALF = TARGET == CODES_AND_HALF, WITH_FLOAT = TARGET == CODES_AND_FLOAT;
    constexpr bool QUANTIZED = TARGET == CODES || WITH_HALF || WITH_FLOAT;
    static_assert(!WITH_HALF || (NORM && SOURCE == NONE), "only a norm is written twice");
    static_assert(!WITH_FLOAT || (NORM && SOURCE == FROM_HALF), "only a norm of a sum is written in fp32 too");
    constexpr Order ORDER = static_cast<Order>(IN);
    extern __shared__ __align__(128) uint4 memory[];
    __shared__ RowScratch<THREADS, NORM ? VECTORS : 1> scratch;
    launch_dependent_grids();
    const int index = blockIdx.x * (blockDim.x / THREADS) + threadIdx.x / THREADS, thread = threadIdx.x % THREADS;
    if (NORM && !LOADED && rows <= PREFETCH_MAX_ROWS)
#pragma unroll
        for (int i = 0; i < VECTORS; ++i)
            if ((i * THREADS + thread) * 8 < k) prefetch_l2(norm_weight + (i * THREADS + thread) * 8);
    const int padded = (k + 15) / 16 * 16;
    constexpr bool HALVES = LOADED && SOURCE == NONE && QUANTIZED;
    using Layout = typename Conditional<HALVES, HalfVectors<THREADS>, WholeVectors<THREADS>>::type;
    const NormParams<Layout> params = {norm_weight, norm_bias, eps, k, padded};
    const auto norm = norm_of<LOADED, PREPARE == LAYER_NORM>(params);
    wait_on_dependent_grids();
    const int row = min(index, rows - 1), written = index < rows ? padded : 0;
    const auto count_rows = [&] {
        if constexpr (WITH_HALF)
            if (x_scale) {
                const int each = blockDim.x / THREADS, counted = min(each, rows - static_cast<int>(blockIdx.x) * each);
                int* const counter = reinterpret_cast<int*>(const_cast<float*>(x_scale));
                __syncthreads();
                if (threadIdx.x == 0) red_add_release(counter, counted);
            }
    };
    __half* const half_out = WITH_HALF ? static_cast<__half*>(const_cast<void*>(data)) + row * pitch : nullptr;
    if constexpr (HALVES) {
        quantize_norm<static_cast<Order>(OUT), PREPARE == LAYER_NORM, ROTATED != NOT_ROTATED, WITH_HALF>(
            residual + row * residual_pitch, half_out, norm, padded, row, static_cast<int8*>(out), out_ld, scales,
            rotation, rotation_scale, scratch);
        count_rows();
        return;
    }
    if constexpr (is_half_to_codes(SOURCE, PREPARE, TARGET, ROTATED)) {
        quantize_half<static_cast<Order>(OUT), PREPARE, THREADS, VECTORS>(
            static_cast<const __half*>(data) + row * pitch, k, padded, written, row, static_cast<int8*>(out), out_ld,
            scales, scratch);
        return;
    }
    if constexpr (are_rotated_halves(SOURCE, PREPARE, TARGET, THREADS, VECTORS, ROTATED)) {
        const __half* x = static_cast<const __half*>(data);
        const int stride = gridDim.x * (blockDim.x / THREADS);
        int8* const codes = static_cast<int8*>(out);
        if constexpr (ROTATED == IN_MEMORY)
            quantize_moved_rows<static_cast<Order>(OUT), PREPARE, THREADS>(
                x, pitch, k, padded, index, stride, rows, codes, out_ld, scales, rotation, rotation_scale, scratch,
                memory);
        else
            quantize_rotated_rows<static_cast<Order>(OUT), PREPARE, THREADS, VECTORS>(
                x, pitch, k, padded, index, stride, rows, codes, out_ld, scales, rotation, rotation_scale, scratch);
        return;
    }
    const bool aligned = k % 8 == 0;  // the second half of x
    const Values values = {data, x_scale, w_scale, bias, pitch};
    const auto column_of = [thread](int vector) { return (vector * THREADS + thread) * 8; };
    float v[VECTORS][8];
    constexpr int AT_ONCE = VECTORS <= 4 ? VECTORS : 1;
    const Values stream = {residual, nullptr, nullptr, nullptr, residual_pitch};
    const float row_factor = SOURCE == FROM_INT32 ? x_scale[row] : 0.0f;
#pragma unroll
    for (int first = 0; first < VECTORS; first += AT_ONCE) {
        Raw<SOURCE> raw[AT_ONCE];
        Raw<GATE ? SOURCE : NONE> up_raw[AT_ONCE];
        Raw<NORM ? FROM_FLOAT : NONE> residual_raw[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int column = column_of(first + i) < padded ? column_of(first + i) : 0;
            raw[i].template fetch<ORDER>(values, row, column);
            // min: the memory may end with the second half
            if (GATE && aligned) up_raw[i].template fetch<ORDER>(values, row, k + min(column, k - 8));
            if constexpr (NORM) residual_raw[i].template fetch<Order::ROW>(stream, row, column);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int column = column_of(first + i) < padded ? column_of(first + i) : 0;
            float (&x)[8] = v[first + i];
            if constexpr (SOURCE != NONE) raw[i].convert(values, row_factor, column, x);
            if constexpr (GATE) {
                float up[8];
                if (aligned)
                    up_raw[i].convert(values, row_factor, k + column, up);
                else
                    load_unaligned_up<SOURCE, ORDER>(values, row, column_of(first + i), k, up);
#pragma unroll
                for (int j = 0; j < 8; ++j) x[j] = rounded(__fmul_rn(activate<PREPARE - GATE_SILU>(x[j]), up[j]));
            }
            if constexpr (PREPARE >= ACTIVATE_SILU)
#pragma unroll
                for (int j = 0; j < 8; ++j) x[j] = rounded(activate<PREPARE - ACTIVATE_SILU>(x[j]));
            if constexpr (NORM) {
                float r[8];
                residual_raw[i].convert(stream, 0, column, r);
#pragma unroll
                for (int j = 0; j < 8; ++j) x[j] = SOURCE == NONE ? r[j] : __fadd_rn(r[j], x[j]);
            }
        }
    }
    if (k < THREADS * VECTORS * 8)
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) zero_tail(v[i], column_of(i), k);
    if constexpr (NORM && SOURCE != NONE && !WITH_FLOAT)
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) store_vector(residual + row * residual_pitch, column_of(i), written, v[i]);
    float top = 0;
    if constexpr (NORM) {
        constexpr bool BY_LANES = ROTATED == BETWEEN_LANES;
        top = norm_and_rotate < THREADS, PREPARE == LAYER_NORM, QUANTIZED && ROTATED != IN_MEMORY,
        BY_LANES > (v, norm, rotation, rotation_scale, scratch, [&] {
            if constexpr (WITH_HALF)
#pragma unroll
                for (int i = 0; i < VECTORS; ++i) store_vector(half_out, column_of(i), written, v[i]);
            if constexpr (WITH_FLOAT)
#pragma unroll
                for (int i = 0; i < VECTORS; ++i)
                    store_vector(const_cast<float*>(x_scale) + row * residual_pitch, column_of(i), written, v[i]);
        });
        if constexpr (ROTATED == IN_MEMORY) {
            quantize_turned<static_cast<Order>(OUT)>(
                v, row, written, static_cast<int8*>(out), out_ld, scales, rotation, rotation_scale, scratch,
                reinterpret_cast<float*>(memory));
            count_rows();
            return;
        }
    } else {
        if constexpr (ROTATED != NOT_ROTATED) rotate_row(v, rotation, rotation_scale);
        if constexpr (TARGET == CODES) top = row_max<THREADS>(v, scratch);
    }
    const RowScale s = row_scale(top);
    if (QUANTIZED && thread == 0 && written) scales[row] = s.scale;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int column = column_of(i);
        if constexpr (QUANTIZED) {
            if (column >= written) continue;
            int8* codes = static_cast<int8*>(out) + offset<static_cast<Order>(OUT)>(row, column, out_ld);
            *reinterpret_cast<uint2*>(codes) = quantize8(v[i], s.ratio);
        }
        if constexpr (TARGET == TO_HALF) store_vector(static_cast<__half*>(out) + row * out_ld, column, written, v[i]);
        if constexpr (TARGET == TO_FLOAT) store_vector(static_cast<float*>(out) + row * out_ld, column, written, v[i]);
        if constexpr (TARGET == ADD_TO_FLOAT) {
            if (column >= written) continue;
            float* target = static_cast<float*>(out) + row * out_ld + column;
            float r[8];
            load8(target, r);
#pragma unroll
            for (int j = 0; j < 8; ++j) r[j] = __fmul_rn(__fadd_rn(r[j], v[i][j]), rotation_scale);
            store8(target, r);
        }
    }
    count_rows();
}

// out = x_scale[row] * (w_scale[column] * sum) + bias[column], or with ADD out += fp16 of that. data: the sums of a
// GEMM [rows, n], int32 or fp32, laid out by IN; a null scale is 1. out: fp16 or fp32 [rows, out_pitch]. A thread
// computes eight elements.
template <class SUM, int IN, bool ADD, class T>
__global__ void __launch_bounds__(256) dequantize(
    const SUM* data, const float* x_scale, const float* w_scale, const float* bias, long long ld, T* out,
    long long out_pitch, int rows, int n) {
    launch_dependent_grids();
    wait_on_dependent_grids();
    const int vectors = (n + 7) / 8;
    const long long index = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int row = static_cast<int>(index / vectors), column = static_cast<int>(index % vectors) * 8;
    if (row >= rows) return;
    float y[8], w[8];
    load8(data + offset<static_cast<Order>(IN)>(row, column, ld), y);
    if (w_scale) {
        load8(w_scale + column, w);
#pragma unroll
        for (int j = 0; j < 8; ++j) y[j] = __fmul_rn(w[j], y[j]);
    }
    if (x_scale) {
        const float s = x_scale[row];
#pragma unroll
        for (int j = 0; j < 8; ++j) y[j] = __fmul_rn(s, y[j]);
    }
    if (bias) {
        load8(bias + column, w);
#pragma unroll
        for (int j = 0; j < 8; ++j) y[j] = __fadd_rn(y[j], w[j]);
    }
    T* target = out + row * out_pitch + column;
    if constexpr (ADD) {
        load8(target, w);
#pragma unroll
        for (int j = 0; j < 8; ++j) y[j] = __fadd_rn(w[j], rounded(y[j]));
    }
    store8(target, y);
}

// Queries, keys and values side by side, the first two each with an RMSNorm over all heads. data: fp32 [rows, pitch];
// out: fp16 [rows, out_pitch]; q, k, v: widths, multiples of 8, of at most VECTORS * 8 * blockDim.x elements. A block
// handles one of the three parts (blockIdx.x) of one row.
template <int VECTORS>
__global__ void __launch_bounds__(512) norm_qk(
    const float* data, long long pitch, const float* q_weight, float q_eps, const float* k_weight, float k_eps,
    __half* out, long long out_pitch, int q, int k, int v) {
    __shared__ RowScratch<512, VECTORS> scratch;
    launch_dependent_grids();
    const int part = blockIdx.x;
    const int first = part == 0 ? 0 : part == 1 ? q : q + k, width = part == 0 ? q : part == 1 ? k : v;
    const float* weight = part == 0 ? q_weight : k_weight;
    const auto column_of = [](int i) { return (i * 512 + static_cast<int>(threadIdx.x)) * 8; };
    if (part < 2)
#pragma unroll
        for (int i = 0; i < VECTORS; ++i)
            if (column_of(i) < width) prefetch_l2(weight + column_of(i));
    wait_on_dependent_grids();
    const float* from = data + blockIdx.y * pitch + first;
    __half* to = out + blockIdx.y * out_pitch + first;
    float x[VECTORS][8];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) load_row8(from, column_of(i), width, width, x[i]);
    if (part < 2)
        normalise_row<512, false, false>(x, weight, nullptr, part == 0 ? q_eps : k_eps, width, width, scratch);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) store_vector(to, column_of(i), width, x[i]);
}

// out[row] = table[tokens[row]], with SCALED times `scale`; table: fp16 [vocab, pitch]; out: the residual stream, fp32
// [rows, out_pitch]. A block handles one row. As the first kernel of a step it calls launch_dependent_grids after it
// has waited: the kernels after it start when all earlier steps have ended, and what wrote this step's integers. So
// they may read these, the cache and weights before they wait.
template <bool SCALED>
__global__ void __launch_bounds__(256) embed(
    const int* tokens, const __half* table, long long pitch, float* out, long long out_pitch, int k, float scale) {
    wait_on_dependent_grids();
    launch_dependent_grids();
    const long long row = blockIdx.x;
    const long long token = tokens[row];
    for (int column = threadIdx.x * 8; column < k; column += blockDim.x * 8) {
        float x[8];
        load8(table + token * pitch + column, x);
        if constexpr (SCALED)
#pragma unroll
            for (int j = 0; j < 8; ++j) x[j] = __fmul_rn(x[j], scale);
        store8(out + row * out_pitch + column, x);
    }
}

// out[i] = x[rows[i] - before], in words of 4 bytes. A block handles one row.
__global__ void __launch_bounds__(256)
    gather_rows(const int* rows, int before, const float* x, long long pitch, float* out, long long out_pitch, int k) {
    wait_on_dependent_grids();
    const long long from = rows[blockIdx.x] - before, to = blockIdx.x;
    for (int column = threadIdx.x * 8; column < k; column += blockDim.x * 8) {
        float v[8];
        load8(x + from * pitch + column, v);
        store8(out + to * out_pitch + column, v);
    }
}

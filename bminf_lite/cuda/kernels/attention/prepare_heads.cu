// Preparation of the heads of many tokens before prefill attention:
//
//     q = rope(norm(queries)); the cache at each token's position = rope(norm(keys)), norm(values)
//
// Queries and keys are transformed behind that (rotated_heads in backend/rotation.py) in blocks of `rotated_pairs`
// pairs of elements, a power of two that divides head_dim / 2; 0: not at all.
//
// data: the fused projection [T, (heads + 2 * kv_heads) * head_dim], see Values, laid out by IN. q: fp16 [T, heads,
// head_pitch]; heads before first_head are left out, so without queries (first_head = heads) it may be null. keys,
// values: CACHE [num_blocks, kv_heads, BLOCK_SIZE, head_pitch], __half or int8; for int8 key_scales and value_scales:
// fp16 [num_blocks, kv_heads, BLOCK_SIZE]. Padding from head_dim to head_pitch is written as zeros.
// Sequence b has the tokens cu_seqlens[b] to cu_seqlens[b + 1] - 1 at positions from context_lens[b] on. Token p of it
// is in block block_tables[b, p / BLOCK_SIZE]; block_tables: int32 [sequences, table_pitch]. Without block_tables
// (null) keys and values are [T, kv_heads, head_pitch]. Tokens behind the last sequence pad the step and are left out.
//
// Block (t, j) prepares heads of token cu_seqlens[0] + t, and of every gridDim.x-th behind it. A head has `lanes`
// neighbouring threads, a power of two; thread u of them has the elements N u to N u + N - 1 of either half. The
// arithmetic is that of decode attention, so a token's key and value have the same bits whichever kernel prepares them.
#include "attention/int8_cache.cuh"
#include "attention/place.cuh"
#include "common/values.cuh"
#include "constants/attention.cuh"
#include "constants/prepare_heads.cuh"

using namespace bminf;

constexpr int MAX_HALF = PAIRS * WARP;  // of head_dim

// Eight neighbouring elements of a row as fp16, of which `count` exist; the others are zeros. With `whole` all or none
// exist, and they are aligned.
template <bool FROM_INT32, int IN>
__device__ __forceinline__ uint4 load_part(const Values& source, int row, int column, int count, bool whole) {
    uint4 raw = make_uint4(0, 0, 0, 0);
    if (!FROM_INT32 && whole) {
        const __half* const x = static_cast<const __half*>(source.data) + row * source.pitch + column;
        if (count) raw = *reinterpret_cast<const uint4*>(x);
        return raw;
    }
    __half* const x = reinterpret_cast<__half*>(&raw);
#pragma unroll
    for (int i = 0; i < N; ++i)
        if (i < count) x[i] = __float2half_rn(source.at<FROM_INT32, static_cast<Order>(IN)>(row, column + i));
    return raw;
}

// Writes what load_part loads.
template <class T, class RAW>
__device__ __forceinline__ void store_part(T* out, const RAW& raw, int count, bool whole) {
    if (whole) {
        if (count) *reinterpret_cast<RAW*>(out) = raw;
        return;
    }
#pragma unroll
    for (int i = 0; i < N; ++i)
        if (i < count) out[i] = reinterpret_cast<const T*>(&raw)[i];
}

// One level of the tree of a head's squares: the lanes `distance` apart, which have the same ones of its pairs i, keep
// one half of them each and add the other's, the upper lane the upper half.
template <int COUNT, class T>
__device__ __forceinline__ void add_halves(const T (&x)[COUNT], int distance, double (&kept)[COUNT / 2]) {
    const bool upper = threadIdx.x & distance;
#pragma unroll
    for (int i = 0; i < COUNT / 2; ++i) {
        const T low = x[i], high = x[i + COUNT / 2], other = __shfl_xor_sync(FULL, upper ? low : high, distance);
        kept[i] = static_cast<double>(upper ? high : low) + static_cast<double>(other);
    }
}

// The sum of the squares of a head of eight lanes, in all of them: of pairs 32, 16 and 8 apart, which other lanes have,
// and then of those 4, 2 and 1 apart, whose sums lanes as far apart have by then.
__device__ __forceinline__ double sum_of_eight_lanes(const float (&squares)[N]) {
    static_assert(N == 8, "three levels among lanes, and three among the pairs of one");
    double of_32[4], of_16[2], of_8[1];
    add_halves(squares, 4, of_32);
    add_halves(of_32, 2, of_16);
    add_halves(of_16, 1, of_8);
    double sum = of_8[0];
#pragma unroll
    for (int d = 4; d; d /= 2) sum += __shfl_xor_sync(FULL, sum, d);
    return sum;
}

// RMSNorm of the heads of a warp; norm_weight: of this thread's head, null for one without a norm. The squares are
// added in the order of norm_and_rope, where a lane has the pairs 32 apart: these one after another, then pairs that
// are 16, 8, 4, 2 and 1 apart. whole: see load_part.
__device__ __forceinline__ void norm_parts(
    float (&low)[N], float (&high)[N], const float* norm_weight, float eps, int head_dim, int count, int lanes,
    bool whole) {
    const int part = threadIdx.x & (lanes - 1), half = head_dim / 2;
    float squares_of_part[N];
    double sum;
#pragma unroll
    for (int i = 0; i < N; ++i) squares_of_part[i] = fmaf(low[i], low[i], high[i] * high[i]);
    if (lanes == 8) {
        sum = sum_of_eight_lanes(squares_of_part);
    } else {
        double squares[N];
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const double square = squares[i] = squares_of_part[i];
            if (lanes > 4) {
                squares[i] = __shfl_sync(FULL, square, part % 4, lanes);
                for (int j = 4; j < lanes; j += 4) squares[i] += __shfl_sync(FULL, square, part % 4 + j, lanes);
            }
            if (lanes > 2) squares[i] += __shfl_xor_sync(FULL, squares[i], 2);
            if (lanes > 1) squares[i] += __shfl_xor_sync(FULL, squares[i], 1);
        }
        tree_sum(squares);
        sum = squares[0];
    }
    if (norm_weight == nullptr || count == 0) return;
    const float inverse = __fdiv_rn(1.0f, __fsqrt_rn(static_cast<float>(divided(sum, head_dim)) + eps));
    const auto multiply = [&](float (&x)[N], const float* weight) {
        if (whole) {
            float w[N];
            load8(weight, w);
#pragma unroll
            for (int i = 0; i < N; ++i) x[i] = __fmul_rn(__fmul_rn(x[i], w[i]), inverse);
            return;
        }
#pragma unroll
        for (int i = 0; i < N; ++i)
            if (i < count) x[i] = __fmul_rn(__fmul_rn(x[i], weight[i]), inverse);
    };
    multiply(low, norm_weight + part * N);
    multiply(high, norm_weight + half + part * N);
}

// rotated_heads of the heads of a warp, but for values.
__device__ __forceinline__ void rotate_parts(float (&low)[N], float (&high)[N], int pairs, int part, bool is_value) {
    if (!is_value) {
#pragma unroll
        for (int h = 1; h < N; h *= 2) {
            if (h >= pairs) break;
#pragma unroll
            for (int i = 0; i < N; ++i) {
                if (i & h) continue;
                const float a = low[i], b = low[i | h], c = high[i], d = high[i | h];
                low[i] = __fadd_rn(a, b), low[i | h] = __fsub_rn(a, b);
                high[i] = __fadd_rn(c, d), high[i | h] = __fsub_rn(c, d);
            }
        }
    }
#pragma unroll 1
    for (int h = N; h < pairs; h *= 2) {
        const int distance = h / N;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const float other_low = __shfl_xor_sync(FULL, low[i], distance);
            const float other_high = __shfl_xor_sync(FULL, high[i], distance);
            if (is_value) continue;
            low[i] = part & distance ? __fsub_rn(other_low, low[i]) : __fadd_rn(low[i], other_low);
            high[i] = part & distance ? __fsub_rn(other_high, high[i]) : __fadd_rn(high[i], other_high);
        }
    }
    if (is_value) return;
    const float root = rotation_root(pairs);
#pragma unroll
    for (int i = 0; i < N; ++i) rotate_last(low[i], high[i], root);
}

// A token of a block, and what a thread has of it.
struct Part {
    Place place;
    int block;        // of the cache; -1: the table has none
    uint4 low, high;  // of the head's halves, as fp16
};

// LANES: the lanes of a head of 2 * N * LANES elements without padding, in fp16 rows. Blocks then take tokens in
// rounds, and load those of the next round while they compute. 0: any head, and a block for each token.
template <bool FROM_INT32, int IN, class CACHE, int LANES>
__global__ void __launch_bounds__(THREADS, BLOCKS) prepare_heads(
    const void* data, const float* x_scale, const float* w_scale, const float* bias, long long pitch,
    const float* q_norm_weight, const float* k_norm_weight, const float* v_norm_weight, const float* frequencies,
    float eps, float rope_scale, const int* cu_seqlens, const int* context_lens, const int* block_tables,
    int table_pitch, int sequences, __half* q, CACHE* keys, CACHE* values, int heads, int kv_heads, int head_dim,
    int head_pitch, __half* key_scales, __half* value_scales, int first_head, int lanes, int rotated_pairs) {
    // Of the position of a round's token, for each pair. Rounds take turns, so that one begins while another ends.
    constexpr int COPIES = LANES ? 2 : 1, ALL_PAIRS = LANES ? LANES * N : MAX_HALF;
    __shared__ alignas(16) float all_cosines[COPIES][ALL_PAIRS], all_sines[COPIES][ALL_PAIRS];
    launch_dependent_grids();
    if (LANES) lanes = LANES, head_dim = head_pitch = 2 * N * LANES;  // known to the compiler
    const int half = head_dim / 2, part = threadIdx.x & (lanes - 1), all_heads = heads + 2 * kv_heads;
    const int head = first_head + ((blockIdx.y * blockDim.x + threadIdx.x) >> (__ffs(lanes) - 1));
    const int count = head < all_heads ? LANES ? N : max(0, min(N, half - part * N)) : 0;  // pairs of this thread
    const bool whole = LANES || half % N == 0;
    // The time is that of loads which follow one another, so what can be loaded early is.
    float frequency = 0;
    if (frequencies != nullptr && threadIdx.x < half) frequency = frequencies[threadIdx.x];
    wait_on_dependent_grids();
    const int end = cu_seqlens[sequences];
    const Values source = {data, x_scale, w_scale, bias, pitch};
    const auto load = [&](const Place& place) {
        Part own = {place};
        const int column = head * head_dim + part * N, number = own.place.position / BLOCK_SIZE;
        own.low = load_part<FROM_INT32, IN>(source, own.place.token, column, count, whole);
        own.high = load_part<FROM_INT32, IN>(source, own.place.token, column + half, count, whole);
        own.block = block_tables == nullptr ? 0 : -1;
        if (block_tables != nullptr && number < table_pitch)
            own.block = block_tables[static_cast<long long>(own.place.sequence) * table_pitch + number];
        return own;
    };
    const Place first = find_place(cu_seqlens, context_lens, sequences);
    if (first.token >= end) return;
    Part next = load(first);
    int round = 0, index = blockIdx.x;
    bool is_last;
    do {
        const Part now = next;
        const int token = now.place.token, position = now.place.position;
        index += gridDim.x, is_last = !LANES || token + gridDim.x >= end;
        float *const cosines = all_cosines[round], *const sines = all_sines[round];
        if (LANES) round ^= 1;
        if (frequencies != nullptr) {
            for (int pair = threadIdx.x; pair < half; pair += blockDim.x) {
                const float own = pair < blockDim.x ? frequency : frequencies[pair];
                rope_angle(position, own, rope_scale, cosines[pair], sines[pair]);
            }
            __syncthreads();
        }
        const bool is_query = head < heads, is_value = head >= heads + kv_heads;
        float low[N], high[N];
        load8(reinterpret_cast<const __half*>(&now.low), low);
        load8(reinterpret_cast<const __half*>(&now.high), high);
        if (!is_last) next = load(find_place(cu_seqlens, context_lens, sequences, index));
        if (now.block < 0) continue;
        // The index in the cache of the token's first key-value head, and how much further the next head is.
        long long cached = static_cast<long long>(token) * kv_heads, head_stride = 1;
        if (block_tables != nullptr)
            cached = static_cast<long long>(now.block) * kv_heads * BLOCK_SIZE + position % BLOCK_SIZE,
            head_stride = BLOCK_SIZE;
        const auto rotate = [&] {
            if (frequencies == nullptr || is_value) return;
            float cosine[N], sine[N];
            load8(cosines + part * N, cosine);
            load8(sines + part * N, sine);
#pragma unroll
            for (int i = 0; i < N; ++i)  // the norm behind it reads zeros behind the last pair, which has no angle
                if (!ROPE_FIRST || i < count) rotate_pair(low[i], high[i], cosine[i], sine[i]);
        };
        if (ROPE_FIRST) rotate();
        if (q_norm_weight != nullptr || k_norm_weight != nullptr || v_norm_weight != nullptr) {
            const float* const weight = is_value ? v_norm_weight : is_query ? q_norm_weight : k_norm_weight;
            norm_parts(low, high, weight, eps, head_dim, count, lanes, whole);
        }
        if (!ROPE_FIRST) rotate();
        if (IS_INT8<CACHE> && rotated_pairs) rotate_parts(low, high, rotated_pairs, part, is_value);
        uint4 raw_low, raw_high;
        store8(reinterpret_cast<__half*>(&raw_low), low);
        store8(reinterpret_cast<__half*>(&raw_high), high);
        const long long row = cached + (is_value ? head - heads - kv_heads : head - heads) * head_stride;
        const int padding = part == 0 && head < all_heads ? head_pitch - head_dim : 0;
        if constexpr (IS_INT8<CACHE>) {
            load8(reinterpret_cast<const __half*>(&raw_low), low);
            load8(reinterpret_cast<const __half*>(&raw_high), high);
            float top = 0;
#pragma unroll
            for (int i = 0; i < N; ++i)
                if (i < count) top = absmax(absmax(top, low[i]), high[i]);
            for (int d = lanes / 2; d; d /= 2) top = absmax(top, __shfl_xor_sync(FULL, top, d));
            if (!is_query) {
                const __half stored = head_scale(top);
                const float scale = __half2float(stored);
                uint2 codes_low, codes_high;
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    reinterpret_cast<int8*>(&codes_low)[i] = head_code(low[i], scale);
                    reinterpret_cast<int8*>(&codes_high)[i] = head_code(high[i], scale);
                }
                CACHE* const out = (is_value ? values : keys) + row * head_pitch;
                store_part(out + part * N, codes_low, count, whole);
                store_part(out + half + part * N, codes_high, count, whole);
                for (int i = 0; i < padding; ++i) out[head_dim + i] = 0;
                if (part == 0 && head < all_heads) (is_value ? value_scales : key_scales)[row] = stored;
                continue;
            }
        }
        __half* out = q + (static_cast<size_t>(token) * heads + head) * head_pitch;
        if constexpr (!IS_INT8<CACHE>)
            if (!is_query) out = (is_value ? values : keys) + row * head_pitch;
        store_part(out + part * N, raw_low, count, whole);
        store_part(out + half + part * N, raw_high, count, whole);
        for (int i = 0; i < padding; ++i) out[head_dim + i] = __float2half_rn(0.0f);
    } while (!is_last);
}

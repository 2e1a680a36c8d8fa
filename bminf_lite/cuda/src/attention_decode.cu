// Attention of one new token per sequence. The context is split over blocks, so that a long one fills the GPU even at
// batch 1, and over their warps, which need nothing of each other until they put their parts together. Norm, rotation and
// the cache write of the new token happen here too.
//
// A warp takes 16 tokens at once, from memory straight into registers as the tensor cores want them: which column of a
// product is which element of a head, and which token, is free to choose, so a thread loads 16 bytes at a time. The rows of
// the products are the query heads that share these keys and values. Weights are not rounded: a weight's row of fp16 has
// below it, eight rows further, a row of what rounding took away.
#include "attention_decode.cuh"
#include "attention_decode_int8.cuh"

using namespace bminf;

constexpr int HEADS = 8;  // of a block at most: half the rows of a product
constexpr int TILE = 16;  // tokens
constexpr int THREADS = 128;  // a warp for each quarter of a multiprocessor, so that a product's block has room beside it
constexpr int WARPS = THREADS / WARP;
constexpr int STEP = WARPS * TILE;
constexpr float LOG2_E = 1.4426950408889634f;

// What the new token sees: those before it and itself; the same, with a bias by the distance; or the whole source in its
// slot, to which it adds nothing.
enum Kind { CAUSAL = 0, BIASED = 1, SOURCE = 2 };

// The keys of a tile, of which a thread holds tokens lane / 4 and that plus 8, eight elements of each 32.
template <int D>
struct Keys {
    int4 of[2][D / 32];

    // from: the tile's first key, of which `present` count; the others become zeros, because what was never written may be NaN.
    __device__ __forceinline__ void load(const Cached<__half>& cached, int pitch, int present) {
        const int token = threadIdx.x % WARP / 4, column = threadIdx.x % 4 * 8;
        const __half* const from = cached.data;
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int c = 0; c < D / 32; ++c) {
                const bool here = token + 8 * j < present && column + 32 * c < pitch;
                of[j][c] = here ? __ldcg(reinterpret_cast<const int4*>(from + (token + 8 * j) * pitch + column + 32 * c)) : int4{};
            }
    }
    __device__ __forceinline__ void replace(int row, const __half* by, __half) {
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int c = 0; c < D / 32; ++c)
                if (row == static_cast<int>(threadIdx.x) % WARP / 4 + 8 * j)
                    of[j][c] = *reinterpret_cast<const int4*>(by + threadIdx.x % 4 * 8 + 32 * c);
    }
    // Scores of the queries in shared memory: of the head lane / 4, tokens lane % 4 * 2, one more, and those plus 8.
    __device__ __forceinline__ void multiply(const __half (*query)[D], float (&score)[4]) const {
        float s[2][4] = {};
#pragma unroll
        for (int c = 0; c < D / 32; ++c) {
            const int4 q = *reinterpret_cast<const int4*>(&query[threadIdx.x % WARP / 4][threadIdx.x % 4 * 8 + 32 * c]);
            const unsigned low[4] = {static_cast<unsigned>(q.x), 0, static_cast<unsigned>(q.y), 0};
            const unsigned high[4] = {static_cast<unsigned>(q.z), 0, static_cast<unsigned>(q.w), 0};
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                multiply_add(s[j], low, of[j][c].x, of[j][c].y);
                multiply_add(s[j], high, of[j][c].z, of[j][c].w);
            }
        }
        score[0] = s[0][0], score[1] = s[0][1], score[2] = s[1][0], score[3] = s[1][1];
    }
};

// 64 elements of the values of a tile, of which a thread holds the tokens of its scores, eight elements of each.
struct Values {
    int4 of[4];

    __device__ __forceinline__ void load(const Cached<__half>& cached, int first, int pitch, int present) {
        const int column = first + threadIdx.x % WARP / 4 * 8;
        const __half* const from = cached.data;
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            const bool here = token_of(m) < present && column < pitch;
            of[m] = here ? __ldcg(reinterpret_cast<const int4*>(from + token_of(m) * pitch + column)) : int4{};
        }
    }
    __device__ __forceinline__ void replace(int token, const __half* by, __half) {
#pragma unroll
        for (int m = 0; m < 4; ++m)
            if (token_of(m) == token) of[m] = *reinterpret_cast<const int4*>(by + threadIdx.x % WARP / 4 * 8);
    }
    // Adds the values, weighted, to o[i]: elements lane % 4 * 16 + i, and that plus 8, of the head lane / 4, in two parts each
    // that are to be added.
    __device__ __forceinline__ void multiply(const unsigned (&weights)[4], float (&o)[8][4]) const {
        const unsigned(&word)[4][4] = reinterpret_cast<const unsigned(&)[4][4]>(of);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const unsigned halves = i % 2 ? 0x7632 : 0x5410;
            multiply_add(o[i], weights, __byte_perm(word[0][i / 2], word[1][i / 2], halves),
                         __byte_perm(word[2][i / 2], word[3][i / 2], halves));
        }
    }
};

// The tile's keys or values, contiguous, on their way to the L2 cache.
template <class CACHE>
__device__ __forceinline__ void prefetch(const Cached<CACHE>& from, int elements) {
    constexpr int LINE = 128 / sizeof(CACHE);
    const int line = threadIdx.x % WARP * LINE;
    for (int i = line; i < elements; i += LINE * WARP) asm volatile("prefetch.global.L2 [%0];" ::"l"(from.data + i));
    if (IS_INT8<CACHE> && line == 0 && elements > 0) asm volatile("prefetch.global.L2 [%0];" ::"l"(from.scales));
}

// Where a block's heads are: `count` query heads from first_head on, which share the key-value head kv.
struct Place {
    int b, position, first_head, count, heads, kv, kv_heads, head_dim, head_pitch;
};

// The new token's key and value, as the cache holds them.
template <int D, class CACHE>
struct Fresh {
    CACHE of[2][D];
    __half scales[2];
};

// The new token's heads: queries to shared memory as fp16; where it is the newest, its key and value there and to the cache.
template <int D, class CACHE>
__device__ __forceinline__ void prepare_token(
    const Projection& source, const Preparation& how, const Place& at, const float (&cosine)[PAIRS], const float (&sine)[PAIRS],
    __half (*query)[D], Fresh<D, CACHE>& fresh, bool newest, CACHE* key, CACHE* value, __half* key_scale, __half* value_scale)
{
    constexpr int ROUNDS = (HEADS + 2 + WARPS - 1) / WARPS;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, half = at.head_dim / 2;
    const int tasks = newest ? at.count + 2 : at.count;
    float low[ROUNDS][PAIRS] = {}, high[ROUNDS][PAIRS] = {};
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const int i = r * WARPS + warp;
        if (i >= tasks) continue;
        const int column = (i < at.count ? at.first_head + i : at.heads + (i - at.count) * at.kv_heads + at.kv) * at.head_dim;
#pragma unroll
        for (int p = 0; p < PAIRS; ++p) {
            const int pair = p * WARP + lane;
            if (pair >= half) continue;
            low[r][p] = source.at<false, Order::ROW>(at.b, column + pair);
            high[r][p] = source.at<false, Order::ROW>(at.b, column + half + pair);
        }
    }
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const int i = r * WARPS + warp;
        if (i >= tasks) continue;
        const float* gain = i < at.count ? how.q_gain : how.k_gain;
        if (i <= at.count) prepare_head(low[r], high[r], how, gain, at.head_dim, cosine, sine);
        __half *near = query[i], *cached = nullptr;
        if constexpr (IS_INT8<CACHE>) {  // what is not left here is a query
            if (i >= at.count) {
                const int which = i - at.count;
                CACHE* const codes = which ? value : key;
                const __half scale = store_codes(codes, fresh.of[which], low[r], high[r], at.head_dim, at.head_pitch);
                if (lane == 0) *(which ? value_scale : key_scale) = fresh.scales[which] = scale;
                continue;
            }
        } else {
            near = i < at.count ? query[i] : fresh.of[i - at.count];
            cached = i < at.count ? nullptr : i == at.count ? key : value;
        }
#pragma unroll
        for (int p = 0; p < PAIRS; ++p) {
            const int pair = p * WARP + lane;
            if (pair >= half) continue;
            near[pair] = __float2half_rn(low[r][p]), near[half + pair] = __float2half_rn(high[r][p]);
            if (cached) cached[pair] = near[pair], cached[half + pair] = near[half + pair];
        }
        for (int d = at.head_dim + lane; d < D; d += WARP) {
            near[d] = __float2half_rn(0.0f);
            if (cached && d < at.head_pitch) cached[d] = near[d];
        }
    }
}

// Grid: (splits, kv_heads * ceil(group / HEADS), sequences) in clusters of CLUSTER splits. D: the head size rounded up to a
// power of two. qkv fp16 [B, pitch]. keys, values: [slots, kv_heads, capacity, head_pitch]. parts: fp32 [B, heads,
// splits / CLUSTER, CLUSTER, 2 + D / CLUSTER] and arrived: int32 [B, gridDim.y, CLUSTER], zero before and after; both are
// used only by several clusters. out: fp16 [B, out_pitch]. For BIASED, bias is fp32 [heads, 2 * reach + 1] by the distance
// key - query; for SOURCE, qkv holds queries only and lengths, int32 [slots], are those of the sources. CACHE: __half, or int8
// with key_scales, value_scales [slots, kv_heads, capacity].
template <int D, int CLUSTER, int KIND, class CACHE>
__global__ void __launch_bounds__(THREADS) attend(
    const __half* qkv, long long pitch, const float* q_gain, const float* k_gain, const float* frequencies, float eps,
    float rope_scale, const int* past, const int* slots, CACHE* keys, CACHE* values, float* parts, int* arrived,
    __half* out, long long out_pitch, int heads, int kv_heads, int head_dim, int head_pitch, int capacity, int window,
    float scale, const float* bias, int reach, const int* lengths, __half* key_scales, __half* value_scales)
{
    constexpr bool EARLY = D <= 128;  // registers have room for the next tile
    constexpr int AHEAD = IS_INT8<CACHE> ? 6 : 3;  // tiles of a warp that are on their way to the L2 cache
    __shared__ __align__(16) __half query[HEADS][D];
    __shared__ __align__(16) Fresh<D, CACHE> fresh;
    __shared__ float warp_top[WARPS][HEADS], warp_sum[WARPS][HEADS], tops[HEADS], sums[HEADS];
    __shared__ __align__(16) float warp_out[WARPS][HEADS][D + 4], outs[HEADS][D];

    const int warp = threadIdx.x / WARP, row = threadIdx.x % WARP / 4, column = threadIdx.x % 4;
    const int split = blockIdx.x, splits = gridDim.x, b = blockIdx.z;
    const int group = heads / kv_heads, groups = (group + HEADS - 1) / HEADS;
    const int kv = blockIdx.y / groups, first_head = kv * group + blockIdx.y % groups * HEADS;
    const int count = min(HEADS, (kv + 1) * group - first_head);
    const int position = KIND == SOURCE ? lengths[slots[b]] - 1 : min(past[b], capacity - 1);
    const int begin = window > 0 ? max(0, position + 1 - window) : 0;
    const int share = ((position + 1 - begin + splits - 1) / splits + TILE - 1) / TILE * TILE;
    const int from = begin + split * share, to = min(position + 1, from + share);
    const bool newest = KIND != SOURCE && from <= position && position < to;
    const int stop = newest ? position : to;  // earlier tokens are in the cache already
    const size_t tokens = (static_cast<size_t>(slots[b]) * kv_heads + kv) * capacity, base = tokens * head_pitch;

    // The first tokens are on their way before the kernel waits for the projection. It is only launched as dependent where no
    // earlier kernel of the step wrote to this cache.
    typename Choose<IS_INT8<CACHE>, Int8Keys<D>, Keys<D>>::type k;
    typename Choose<IS_INT8<CACHE>, Int8Values, Values>::type v[D / 64];
    int first = from + warp * TILE;
    const Cached<CACHE> own_keys = {keys + base, key_scales + tokens}, own_values = {values + base, value_scales + tokens};
    const auto bring = [&](int tile) {
        const int elements = min(TILE, stop - tile) * head_pitch;
        prefetch(own_keys.from(tile, head_pitch), elements);
        prefetch(own_values.from(tile, head_pitch), elements);
    };
    const auto load_keys = [&](int tile) { k.load(own_keys.from(tile, head_pitch), head_pitch, stop - tile); };
    const auto load_values = [&](int tile, int c) {
        v[c].load(own_values.from(tile, head_pitch), 64 * c, head_pitch, stop - tile);
    };
    if (EARLY) {
        load_keys(first);
#pragma unroll
        for (int c = 0; c < D / 64; ++c) load_values(first, c);
    }
#pragma unroll
    for (int i = EARLY; i < AHEAD; ++i) bring(first + i * STEP);
    const Preparation how = {q_gain, k_gain, frequencies, eps, rope_scale};
    float cosine[PAIRS], sine[PAIRS];
    angles(how, position, head_dim, cosine, sine);
    wait_for_predecessor();
    let_successor_start();
    const Place at = {b, position, first_head, count, heads, kv, kv_heads, head_dim, head_pitch};
    const size_t newest_place = base + static_cast<size_t>(position) * head_pitch;
    prepare_token<D>({qkv, nullptr, nullptr, nullptr, pitch}, how, at, cosine, sine, query, fresh, newest, keys + newest_place,
                     values + newest_place, key_scales + tokens + position, value_scales + tokens + position);
    __syncthreads();

    const float* head_bias = bias + static_cast<long long>(first_head + row) * (2 * reach + 1) + reach;  // by distance
    float o[D / 64][8][4] = {}, top = -INF_F, sum = 0;
    for (; first < to; first += STEP) {
        const bool last = newest && first + TILE > position;
        bring(first + AHEAD * STEP);
        float s[4], tile_top = -INF_F;
        if (!EARLY) load_keys(first);
        if (last) k.replace(position - first, fresh.of[0], fresh.scales[0]);
        k.multiply(query, s);
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            const int token = first + token_of(m);
            s[m] *= scale * LOG2_E;
            if (KIND == BIASED && row < count) s[m] += head_bias[max(-reach, min(0, token - position))] * LOG2_E;
            if (token >= to) s[m] = -INF_F;
            tile_top = fmaxf(tile_top, s[m]);  // a NaN gets into the sum below
        }
        if (EARLY) load_keys(first + STEP);
        tile_top = fmaxf(tile_top, __shfl_xor_sync(FULL, tile_top, 1));
        tile_top = fmaxf(tile_top, __shfl_xor_sync(FULL, tile_top, 2));
        if (tile_top > top) {
            const float old = weight_of(top, tile_top);
            sum *= old, top = tile_top;
#pragma unroll
            for (int c = 0; c < D / 64; ++c)
#pragma unroll
                for (int i = 0; i < 8; ++i)
#pragma unroll
                    for (int j = 0; j < 4; ++j) o[c][i][j] *= old;
        }
        float rest[4];
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            s[m] = s[m] == -INF_F ? 0.0f : exp2f(s[m] - top), rest[m] = s[m] - rounded(s[m]);
            sum += s[m];
        }
        const unsigned weights[4] = {pack(s[0], s[1]), pack(rest[0], rest[1]), pack(s[2], s[3]), pack(rest[2], rest[3])};
#pragma unroll
        for (int c = 0; c < D / 64; ++c) {
            if (!EARLY) load_values(first, c);
            if (last) v[c].replace(position - first, fresh.of[1] + 64 * c, fresh.scales[1]);
            v[c].multiply(weights, o[c]);
            if (EARLY) load_values(first + STEP, c);
            else asm volatile("" ::: "memory");  // or registers would hold all of them
        }
    }

    // The threads of a head, the warps of the block, then the blocks.
    sum += __shfl_xor_sync(FULL, sum, 1);
    sum += __shfl_xor_sync(FULL, sum, 2);
    if (column == 0) warp_top[warp][row] = top, warp_sum[warp][row] = sum;
    if (row < count) {
#pragma unroll
        for (int c = 0; c < D / 64; ++c)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float eight[8];
#pragma unroll
                for (int i = 0; i < 8; ++i) eight[i] = o[c][i][j] + o[c][i][j + 2];
                store8(&warp_out[warp][row][64 * c + 16 * column + 8 * j], eight);
            }
    }
    __syncthreads();
    for (int i = threadIdx.x * 4; i < count * D; i += THREADS * 4) {
        const int h = i / D, d = i % D;
        float t = -INF_F, total = 0;
        float4 value = {};
#pragma unroll
        for (int w = 0; w < WARPS; ++w) t = fmaxf(t, warp_top[w][h]);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float weight = weight_of(warp_top[w][h], t);
            const float4 part = *reinterpret_cast<const float4*>(&warp_out[w][h][d]);
            total += warp_sum[w][h] * weight;
            value.x += part.x * weight, value.y += part.y * weight, value.z += part.z * weight, value.w += part.w * weight;
        }
        *reinterpret_cast<float4*>(&outs[h][d]) = value;
        if (d == 0) tops[h] = t, sums[h] = total;
    }
    const Meeting meeting = {parts, arrived, out, out_pitch, heads, head_dim, first_head, count};
    put_together<D, CLUSTER, THREADS>(meeting, outs, tops, sums);
}

// Preparation of the heads of many tokens before prefill attention:
//
//     q = rope(norm(queries)); the cache at each token's position = rope(norm(keys)), values
//
// data: the fused projection [T, (heads + 2 * kv_heads) * head_dim], see Values, laid out by IN. q: fp16 [T, heads,
// head_pitch]. keys, values: CACHE [num_blocks, kv_heads, BLOCK_SIZE, head_pitch], __half or int8; for int8 key_scales
// and value_scales: fp16 [num_blocks, kv_heads, BLOCK_SIZE]. Padding from head_dim to head_pitch is written as zeros.
// Sequence b has the tokens cu_seqlens[b] to cu_seqlens[b + 1] - 1 at positions from context_lens[b] on. Token p of it
// is in block block_tables[b, p / BLOCK_SIZE]; block_tables: int32 [sequences, table_pitch]. Without block_tables
// (null) keys and values are [kv_heads, table_pitch, head_pitch], and a token's place is its index in the step. Tokens
// behind the last sequence pad the step and are left out.
//
// Block (t, j) prepares heads of token cu_seqlens[0] + t; the blocks of a token share its heads. The arithmetic is that
// of decode attention, so a token's key and value have the same bits whichever kernel prepares them.
#include "attention/int8_cache.cuh"
#include "common/values.cuh"
#include "constants/attention.cuh"

using namespace bminf;

template <bool FROM_INT32, int IN, class CACHE>
__global__ void __launch_bounds__(256) prepare_heads(
    const void* data, const float* x_scale, const float* w_scale, const float* bias, long long pitch,
    const float* q_norm_weight, const float* k_norm_weight, const float* frequencies, float eps, float rope_scale,
    const int* cu_seqlens, const int* context_lens, const int* block_tables, int table_pitch, int sequences, __half* q,
    CACHE* keys, CACHE* values, int heads, int kv_heads, int head_dim, int head_pitch, __half* key_scales,
    __half* value_scales) {
    constexpr int AT_ONCE = FROM_INT32 ? 1 : 2;  // heads that a warp loads before it stores any
    launch_dependent_grids();
    wait_on_dependent_grids();
    const Values source = {data, x_scale, w_scale, bias, pitch};
    const HeadParams params = {q_norm_weight, k_norm_weight, frequencies, eps, rope_scale};
    const int token = cu_seqlens[0] + blockIdx.x, warps = blockDim.x / WARP, lane = threadIdx.x % WARP,
              half = head_dim / 2;
    if (token >= cu_seqlens[sequences]) return;
    int sequence = 0;  // of the token: one of `count` from here on, of which each lane looks at one in `step`
    for (int count = sequences; count > 1;) {
        const int step = (count + WARP - 1) / WARP, place = lane * step;
        const bool begins_before = place < count && cu_seqlens[sequence + place] <= token;
        const int skipped = (__popc(__ballot_sync(FULL, begins_before)) - 1) * step;
        sequence += skipped, count = min(step, count - skipped);
    }
    const int position = context_lens[sequence] + token - cu_seqlens[sequence];
    // The index in the cache of the token's first key-value head, and how much further the next head is.
    long long cached = token, head_stride = table_pitch;
    if (block_tables != nullptr) {
        if (position / BLOCK_SIZE >= table_pitch) return;
        const int block = block_tables[static_cast<long long>(sequence) * table_pitch + position / BLOCK_SIZE];
        cached = static_cast<long long>(block) * kv_heads * BLOCK_SIZE + position % BLOCK_SIZE,
        head_stride = BLOCK_SIZE;
    }
    float cosine[PAIRS], sine[PAIRS];
    rope_angles(params, position, head_dim, cosine, sine);
    const int all_heads = heads + 2 * kv_heads, stride = gridDim.y * warps;
    for (int first = blockIdx.y * warps + threadIdx.x / WARP; first < all_heads; first += AT_ONCE * stride) {
        float low[AT_ONCE][PAIRS] = {}, high[AT_ONCE][PAIRS] = {};
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            const int head = first + j * stride;
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) {
                const int pair = i * WARP + lane;
                if (pair >= half || head >= all_heads) continue;
                low[j][i] = source.at<FROM_INT32, static_cast<Order>(IN)>(token, head * head_dim + pair);
                high[j][i] = source.at<FROM_INT32, static_cast<Order>(IN)>(token, head * head_dim + half + pair);
            }
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            const int head = first + j * stride;
            if (head >= all_heads) return;
            const bool is_query = head < heads, is_value = head >= heads + kv_heads;
            if (!is_value)
                norm_and_rope(
                    low[j], high[j], params, is_query ? q_norm_weight : k_norm_weight, head_dim, cosine, sine);
            const int kv_head = is_value ? head - heads - kv_heads : head - heads;
            const long long row = cached + kv_head * head_stride;  // in the cache
            if constexpr (IS_INT8<CACHE>)
                if (!is_query) {
                    CACHE* const codes = (is_value ? values : keys) + row * head_pitch;
                    const __half scale = quantize_head(codes, codes, low[j], high[j], head_dim, head_pitch);
                    if (lane == 0) (is_value ? value_scales : key_scales)[row] = scale;
                    continue;
                }
            __half* out = q + (static_cast<size_t>(token) * heads + head) * head_pitch;
            if constexpr (!IS_INT8<CACHE>)
                if (!is_query) out = (is_value ? values : keys) + row * head_pitch;
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) {
                const int pair = i * WARP + lane;
                if (pair >= half) continue;
                out[pair] = __float2half_rn(low[j][i]);
                out[half + pair] = __float2half_rn(high[j][i]);
            }
            if (lane < head_pitch - head_dim) out[head_dim + lane] = __float2half_rn(0.0f);
        }
    }
}

// Preparation of the heads of many tokens before prefill attention:
//
//     q = rope(norm(queries)); the cache at each token's position = rope(norm(keys)), values
//
// data: the fused projection [T, (heads + 2 * kv_heads) * head_dim], see Values, laid out by IN. q: fp16 [T, heads,
// head_pitch]. keys, values: CACHE [num_blocks, kv_heads, BLOCK_SIZE, head_pitch], __half or int8; for int8 key_scales
// and value_scales: fp16 [num_blocks, kv_heads, BLOCK_SIZE]. Padding from head_dim to head_pitch is written as zeros.
// Sequence b has the tokens cu_seqlens[b] to cu_seqlens[b + 1] - 1 at positions from context_lens[b] on. Token p of it
// is in block block_tables[b, p / BLOCK_SIZE]; block_tables: int32 [sequences, table_pitch].
//
// A block prepares the heads of one token, one warp a head at a time, from token cu_seqlens[0] on. The arithmetic is
// that of decode attention, so a token's key and value have the same bits whichever kernel prepares them.
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
    launch_dependent_grids();
    wait_on_dependent_grids();
    const Values source = {data, x_scale, w_scale, bias, pitch};
    const HeadParams params = {q_norm_weight, k_norm_weight, frequencies, eps, rope_scale};
    const int token = cu_seqlens[0] + blockIdx.x, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP,
              half = head_dim / 2;
    int sequence = 0, last = sequences;  // the sequence of the token, by bisection
    while (last - sequence > 1) {
        const int middle = (sequence + last) / 2;
        if (cu_seqlens[middle] <= token)
            sequence = middle;
        else
            last = middle;
    }
    const int position = context_lens[sequence] + token - cu_seqlens[sequence];
    if (token >= cu_seqlens[sequences] || position / BLOCK_SIZE >= table_pitch) return;
    const int block = block_tables[static_cast<long long>(sequence) * table_pitch + position / BLOCK_SIZE];
    // The index in the cache of the token's first head; BLOCK_SIZE further is the next head.
    const long long cached = static_cast<long long>(block) * kv_heads * BLOCK_SIZE + position % BLOCK_SIZE;
    float cosine[PAIRS], sine[PAIRS];
    rope_angles(params, position, head_dim, cosine, sine);
    for (int head = warp; head < heads + 2 * kv_heads; head += blockDim.x / WARP) {
        const bool is_query = head < heads, is_value = head >= heads + kv_heads;
        float low[PAIRS] = {}, high[PAIRS] = {};
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            const int pair = i * WARP + lane;
            if (pair >= half) continue;
            low[i] = source.at<FROM_INT32, static_cast<Order>(IN)>(token, head * head_dim + pair);
            high[i] = source.at<FROM_INT32, static_cast<Order>(IN)>(token, head * head_dim + half + pair);
        }
        if (!is_value)
            norm_and_rope(low, high, params, is_query ? q_norm_weight : k_norm_weight, head_dim, cosine, sine);
        const int kv_head = is_value ? head - heads - kv_heads : head - heads;
        const long long row = cached + kv_head * BLOCK_SIZE;  // in the cache
        if constexpr (IS_INT8<CACHE>)
            if (!is_query) {
                CACHE* const codes = (is_value ? values : keys) + row * head_pitch;
                const __half scale = quantize_head(codes, codes, low, high, head_dim, head_pitch);
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
            out[pair] = __float2half_rn(low[i]);
            out[half + pair] = __float2half_rn(high[i]);
        }
        if (lane < head_pitch - head_dim) out[head_dim + lane] = __float2half_rn(0.0f);
    }
}

// Attention where the keys need not be those of the sequence's own past, and where a bias may depend on the distance:
// what encoders, cross-attention and relative positions need. A block computes one query head of one token. Its warps
// take the keys in turn, four at a time, each with a softmax of its own that they merge at the end.
#include "common.cuh"

using namespace bminf;

// Whose keys a token sees: those before it and its own, in its slot of the cache; the source in its slot, all of it; or
// all tokens of its sequence in this step, whose keys follow each other.
enum Keys { CACHED = 0, SOURCE = 1, WITHIN = 2 };

constexpr int THREADS = 128;
constexpr int WARPS = THREADS / WARP;
constexpr int BATCH = 4;
constexpr int WIDEST = 256;

// How the keys and values of a sequence lie in memory: elements from one sequence, head and token to the next.
struct Strides {
    long long sequence, head, token;
};

// A warp's softmax so far: its largest score, its sum of weights, and a lane's part of the weighted sum of values.
template <int PARTS>
struct Partial {
    float top = -INF_F, sum = 0, out[PARTS] = {};

    // Takes BATCH more scores, of which the first `count` are of keys that there are.
    __device__ __forceinline__ void add(
        const float (&score)[BATCH], int count, const __half* values, long long stride, int head_dim)
    {
        const int lane = threadIdx.x % WARP;
        float larger = top;
#pragma unroll
        for (int i = 0; i < BATCH; ++i) if (i < count) larger = fmaxf(larger, score[i]);
        const float base = larger == -INF_F ? 0.0f : larger, kept = expf(top - base);
        sum *= kept;
#pragma unroll
        for (int p = 0; p < PARTS; ++p) out[p] *= kept;
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            if (i >= count) continue;
            const float weight = expf(score[i] - base);
            sum += weight;
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                const int column = p * WARP + lane;
                if (column < head_dim) out[p] = fmaf(weight, __half2float(values[i * stride + column]), out[p]);
            }
        }
        top = larger;
    }
};

// q: fp16, token t's head h at q + t q_pitch + h q_head. bias: fp32 [heads, 2 reach + 1] by the distance key - query, or
// null. lengths: int32 [slots], for SOURCE only. A lane holds PARTS elements of a head: head_dim <= 32 PARTS.
template <int KEYS, int PARTS>
__global__ void __launch_bounds__(THREADS) attend_general(
    const __half* q, long long q_pitch, int q_head, const __half* keys, const __half* values,
    long long sequence_stride, long long head_stride, long long token_stride, const float* bias, int reach,
    const int* starts, const int* past, const int* slots, const int* lengths, int sequences,
    __half* out, long long out_pitch, int heads, int kv_heads, int head_dim, float scale)
{
    __shared__ float tops[WARPS], sums[WARPS], parts[WARPS][WIDEST];
    let_successor_start();
    wait_for_predecessor();
    const Strides strides = {sequence_stride, head_stride, token_stride};
    const int token = blockIdx.x, head = blockIdx.y, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    int first = 0, last = sequences;  // the sequence that owns the token, by bisection
    while (last - first > 1) {
        const int middle = (first + last) / 2;
        if (starts[middle] <= token) first = middle; else last = middle;
    }
    const int local = token - starts[first];
    const int position = KEYS == CACHED ? past[first] + local : local;
    const int count = KEYS == CACHED ? position + 1
        : KEYS == SOURCE             ? lengths[slots[first]]
                                     : starts[first + 1] - starts[first];
    const long long base = (KEYS == WITHIN ? starts[first] * strides.token : slots[first] * strides.sequence)
        + head / (heads / kv_heads) * strides.head;
    keys += base, values += base;

    float query[PARTS];
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
        const int column = p * WARP + lane;
        query[p] = column < head_dim ? __half2float(q[token * q_pitch + head * q_head + column]) : 0.0f;
    }
    Partial<PARTS> mine;
    for (int key = warp * BATCH; key < count; key += WARPS * BATCH) {
        float score[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            score[i] = 0;
            if (key + i >= count) continue;
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                const int column = p * WARP + lane;
                if (column < head_dim)
                    score[i] = fmaf(query[p], __half2float(keys[(key + i) * strides.token + column]), score[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
#pragma unroll
            for (int d = WARP / 2; d; d /= 2) score[i] += __shfl_xor_sync(FULL, score[i], d);
            score[i] *= scale;
            if (bias) {
                const int distance = max(-reach, min(reach, key + i - position));
                score[i] += bias[static_cast<long long>(head) * (2 * reach + 1) + distance + reach];
            }
        }
        mine.add(score, min(BATCH, count - key), values + key * strides.token, strides.token, head_dim);
    }

    if (lane == 0) tops[warp] = mine.top, sums[warp] = mine.sum;
#pragma unroll
    for (int p = 0; p < PARTS; ++p) parts[warp][p * WARP + lane] = mine.out[p];
    __syncthreads();
    float top = -INF_F;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) top = fmaxf(top, tops[w]);
    float factor[WARPS], sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        factor[w] = tops[w] == -INF_F && sums[w] == 0 ? 0.0f : expf(tops[w] - (top == -INF_F ? 0.0f : top));
        sum += sums[w] * factor[w];
    }
    for (int column = threadIdx.x; column < head_dim; column += THREADS) {
        float y = 0;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) y = fmaf(parts[w][column], factor[w], y);
        out[token * out_pitch + static_cast<long long>(head) * head_dim + column]
            = __float2half_rn(sum == 0 ? 0.0f : y / sum);
    }
}

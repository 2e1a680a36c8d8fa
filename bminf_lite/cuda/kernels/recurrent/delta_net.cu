// Gated DeltaNet in chunks of CHUNK tokens at fixed positions: the formulas of backend/delta_net.py.
//
// A block of `delta_rule` computes a text of the step, its drafts included, in COLUMNS columns of a value head, chunk
// by chunk. Thread (warp w, lane v) holds ROWS rows of column v of the state, from row w * ROWS on. A chunk begins with
// the keys and deltas of its earlier tokens, which lie in the rings of the sequence's slot, and goes on with new
// tokens. One token and a whole chunk take the same way, so the bits of a token depend on its text alone: a product
// with the state is a sum by fma over the rows of each warp, and the warps are added from the first on; a product of
// two tokens is that of 8 lanes, each of which has every eighth vector of four elements, added in a tree; sums over
// tokens go from the first to the last.
//
// `delta_output` follows it: the norm and the gate of the outputs, and what other blocks of `delta_rule` read of the
// slot, which it therefore leaves alone: keys, decays, and the position of the state.
#include "common/common.cuh"
#include "common/sequences.cuh"
#include "constants/delta_net.cuh"

using namespace bminf;

constexpr int COLUMNS = WARP;
constexpr int PARTS = THREADS / WARP;
constexpr int ROWS = MAX_KEY_DIM / PARTS;  // of a state's column that a thread holds
constexpr int AT_ONCE = 4;                 // tokens whose products with the state are added at once
constexpr int DOT_LANES = 8;

// What the step reads of each token, fp32. mixed: [T, mixed_pitch] with queries, keys and values behind the
// convolution; gates: [T, gates_pitch] with a rate and a decay for each value head, before their functions; decay_rates
// and decay_bias: [value_heads]. Rates are below max_rate.
//
// What the sequences keep, in slots that are a pitch apart: states [value_heads, key_dim, value_dim], and rings of
// ring_rows tokens: keys [key_heads, key_dim], deltas [value_heads, value_dim], decays [value_heads], fp32. ends: the
// position of the state. cu_seqlens to count: see Sequences.
struct DeltaNet {
    const float* mixed;
    long long mixed_pitch;
    const float* gates;
    long long gates_pitch;
    const float* decay_rates;
    const float* decay_bias;
    float* states;
    long long states_pitch;
    float* keys;
    long long keys_pitch;
    float* deltas;
    long long deltas_pitch;
    float* decays;
    long long decays_pitch;
    int* ends;
    long long ends_pitch;
    const int* cu_seqlens;
    const int* context_lens;
    const int* slots;
    long long slots_pitch;
    int count;
    int ring_rows;
    int has_drafts;
    int key_heads;
    int value_heads;
    int key_dim;
    int value_dim;
    float max_rate;

    __device__ __forceinline__ Sequences sequences() const {
        return {cu_seqlens, context_lens, slots, slots_pitch, count};
    }
};

// The chunk that a block computes.
struct Chunk {
    __align__(16) float vectors[2][CHUNK][MAX_KEY_DIM + 4];  // keys and queries, zeros behind key_dim
    float partial[PARTS][2 * AT_ONCE][COLUMNS];
    float read[2][CHUNK][COLUMNS];  // keys and queries times the state
    float scores[2][CHUNK][CHUNK];  // keys and queries times the keys, with decay
    float values[CHUNK][COLUMNS], deltas[CHUNK][COLUMNS];
    float decays[CHUNK], rates[CHUNK];
};

// The sum over a warp, in all lanes.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int d = WARP / 2; d; d /= 2) x = __fadd_rn(x, __shfl_xor_sync(FULL, x, d));
    return x;
}

// What a query or key is multiplied by for a length of 1. Called by a warp.
__device__ __forceinline__ float inverse_length(const float* x, int dim) {
    float sum = 0;
    for (int d = threadIdx.x % WARP; d < dim; d += WARP) sum = fmaf(x[d], x[d], sum);
    return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(warp_sum(sum), 1e-6f)));
}

__device__ __forceinline__ float sigmoid(float x) { return __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-x))); }
__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// Copies queries and keys of the chunk's tokens [known, count) from `mixed`, the first of which is `token`, and keys of
// those before from the ring. Called by all threads.
__device__ __forceinline__ void load_vectors(
    Chunk& chunk, const DeltaNet& net, const float* ring, int key_head, int end, int known, int count, int token) {
    const int lane = threadIdx.x % WARP, dim = net.key_dim;
    const float root = __fdiv_rn(1.0f, __fsqrt_rn(static_cast<float>(dim)));
#pragma unroll 1
    for (int i = threadIdx.x / WARP; i < 2 * CHUNK; i += PARTS) {
        const int row = i % CHUNK, kind = i / CHUNK;  // keys, then queries
        float* to = chunk.vectors[kind][row];
        const float* from = nullptr;
        float factor = 1.0f, scale = 1.0f;
        if (row < known) {
            if (kind == 0) from = ring + ((end + row) % net.ring_rows * net.key_heads + key_head) * dim;
        } else if (row < count) {
            from = net.mixed + (token + row - known) * net.mixed_pitch + ((1 - kind) * net.key_heads + key_head) * dim;
            factor = inverse_length(from, dim);
            if (kind == 1) scale = root;
        }
        for (int d = lane; d < MAX_KEY_DIM; d += WARP)
            to[d] = from && d < dim ? __fmul_rn(__fmul_rn(from[d], factor), scale) : 0.0f;
    }
}

// Rates and log-decays of the chunk's tokens. Called by all threads.
__device__ __forceinline__ void load_gates(
    Chunk& chunk, const DeltaNet& net, const float* ring, int head, int end, int known, int count, int token) {
    const int row = threadIdx.x;
    if (row >= count) return;
    if (row < known) {
        chunk.decays[row] = ring[(end + row) % net.ring_rows * net.value_heads + head];
        return;
    }
    const float* gates = net.gates + (token + row - known) * net.gates_pitch;
    chunk.rates[row] = __fmul_rn(net.max_rate, sigmoid(gates[head]));
    const float a = __fadd_rn(gates[net.value_heads + head], net.decay_bias[head]);
    chunk.decays[row] = __fmul_rn(net.decay_rates[head], softplus(a));
}

// Products of the new tokens' keys and queries with the state. Called by all threads.
__device__ __forceinline__ void read_state(Chunk& chunk, const float (&state)[ROWS], int known, int count) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    for (int first = known; first < count; first += AT_ONCE) {
        const int tokens = min(AT_ONCE, count - first);
#pragma unroll 2
        for (int i = 0; i < 2 * tokens; ++i) {
            const float* x = chunk.vectors[i % 2][first + i / 2] + warp * ROWS;
            float sum = 0;
#pragma unroll
            for (int r = 0; r < ROWS; r += 4) {
                const float4 v = *reinterpret_cast<const float4*>(x + r);
                sum = fmaf(v.x, state[r], sum);
                sum = fmaf(v.y, state[r + 1], sum);
                sum = fmaf(v.z, state[r + 2], sum);
                sum = fmaf(v.w, state[r + 3], sum);
            }
            chunk.partial[warp][i][lane] = sum;
        }
        __syncthreads();
        for (int i = warp; i < 2 * tokens; i += PARTS) {
            float sum = chunk.partial[0][i][lane];
#pragma unroll
            for (int part = 1; part < PARTS; ++part) sum = __fadd_rn(sum, chunk.partial[part][i][lane]);
            chunk.read[i % 2][first + i / 2][lane] = sum;
        }
        __syncthreads();
    }
}

// Products of the new tokens' keys and queries with the keys up to their own, with decay. Called by all threads.
__device__ __forceinline__ void score(Chunk& chunk, int known, int count) {
    for (int i = threadIdx.x / DOT_LANES; i < 2 * CHUNK * (count - known); i += THREADS / DOT_LANES) {
        const int kind = i % 2, j = i / 2 % CHUNK, row = known + i / 2 / CHUNK;
        float sum = 0;
        if (j <= row) {
            const float *x = chunk.vectors[kind][row], *key = chunk.vectors[0][j];
            for (int d = threadIdx.x % DOT_LANES * 4; d < MAX_KEY_DIM; d += DOT_LANES * 4) {
                const float4 a = *reinterpret_cast<const float4*>(x + d), b = *reinterpret_cast<const float4*>(key + d);
                sum = fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
            }
        }
#pragma unroll
        for (int d = DOT_LANES / 2; d; d /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(FULL, sum, d));
        if (j <= row && threadIdx.x % DOT_LANES == 0) {
            const float since = __fsub_rn(chunk.decays[row], chunk.decays[j]);
            chunk.scores[kind][row][j] = __fmul_rn(sum, expf(since > 0.0f ? 0.0f : since));  // a NaN stays
        }
    }
}

// The deltas of the new tokens in a column, one after another. Called by one warp.
__device__ __forceinline__ void correct(Chunk& chunk, int known, int count) {
    const int lane = threadIdx.x % WARP;
#pragma unroll 1
    for (int i = known; i < count; ++i) {
        float earlier = 0;
#pragma unroll 4
        for (int j = 0; j < i; ++j) earlier = fmaf(chunk.scores[0][i][j], chunk.deltas[j][lane], earlier);
        const float known_value = fmaf(expf(chunk.decays[i]), chunk.read[0][i][lane], earlier);
        chunk.deltas[i][lane] = __fmul_rn(chunk.rates[i], __fsub_rn(chunk.values[i][lane], known_value));
    }
}

// The output of a token in a column.
__device__ __forceinline__ float output_of(const Chunk& chunk, int i) {
    const int lane = threadIdx.x % WARP;
    float sum = 0;
    for (int j = 0; j <= i; ++j) sum = fmaf(chunk.scores[1][i][j], chunk.deltas[j][lane], sum);
    return fmaf(expf(chunk.decays[i]), chunk.read[1][i][lane], sum);
}

// The state behind a whole chunk. Called by all threads.
__device__ __forceinline__ void advance(const Chunk& chunk, float (&state)[ROWS]) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const float last = chunk.decays[CHUNK - 1], decay = expf(last);
    float added[ROWS] = {};
#pragma unroll 1
    for (int j = 0; j < CHUNK; ++j) {
        const float delta = __fmul_rn(expf(__fsub_rn(last, chunk.decays[j])), chunk.deltas[j][lane]);
#pragma unroll
        for (int r = 0; r < ROWS; r += 4) {
            const float4 key = *reinterpret_cast<const float4*>(chunk.vectors[0][j] + warp * ROWS + r);
            added[r] = fmaf(key.x, delta, added[r]);
            added[r + 1] = fmaf(key.y, delta, added[r + 1]);
            added[r + 2] = fmaf(key.z, delta, added[r + 2]);
            added[r + 3] = fmaf(key.w, delta, added[r + 3]);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) state[r] = fmaf(decay, state[r], added[r]);
}

// The outputs of all tokens, fp32 [T, out_pitch], and the sums of log-decays since their chunks' starts, `sums` fp32
// [T, value_heads]. States and deltas go to the slots. The grid is (sequences, value_heads, value_dim / COLUMNS).
__global__ void __launch_bounds__(THREADS, 2)
    delta_rule(const DeltaNet net, float* sums, float* out, long long out_pitch) {
    __shared__ Chunk chunk;
    const Sequences step = net.sequences();
    launch_dependent_grids();
    wait_on_dependent_grids();
    const int sequence = blockIdx.x, head = blockIdx.y, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int first_token = step.cu_seqlens[sequence], own_tokens = step.cu_seqlens[sequence + 1] - first_token;
    if (own_tokens == 0 || step.is_draft(sequence, net.has_drafts)) return;
    const int key_head = head / (net.value_heads / net.key_heads), column = blockIdx.z * COLUMNS + lane;
    const bool has_column = column < net.value_dim;
    const int start = step.context_lens[sequence], own_stop = start + own_tokens;
    const int stop = start + step.cu_seqlens[step.end_of_text(sequence, net.has_drafts)] - first_token;
    const long long slot = step.slot(sequence);
    const int loaded = start ? net.ends[slot * net.ends_pitch] : 0;
    const int value = head * net.value_dim + column, values = net.value_heads * net.value_dim;
    const int rows = net.key_dim - warp * ROWS;  // of this thread, if below ROWS
    float* const kept = net.states + slot * net.states_pitch +
                        (static_cast<long long>(head) * net.key_dim + warp * ROWS) * net.value_dim + column;
    float* const deltas = net.deltas + slot * net.deltas_pitch + value;
    float state[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) state[r] = start && has_column && r < rows ? kept[r * net.value_dim] : 0.0f;
    int position = start;  // of the next new token
    for (int end = loaded;; end += CHUNK) {
        const int known = min(position - end, CHUNK), count = min(stop - end, CHUNK);
        const int token = first_token + position - start;
        load_vectors(chunk, net, net.keys + slot * net.keys_pitch, key_head, end, known, count, token);
        load_gates(chunk, net, net.decays + slot * net.decays_pitch, head, end, known, count, token);
        for (int i = warp; i < count; i += PARTS) {
            if (i < known)
                chunk.deltas[i][lane] = has_column ? deltas[(end + i) % net.ring_rows * values] : 0.0f;
            else
                chunk.values[i][lane] =
                    has_column
                        ? net.mixed[(token + i - known) * net.mixed_pitch + 2 * net.key_heads * net.key_dim + value]
                        : 0.0f;
        }
        __syncthreads();
        if (threadIdx.x == 0)
            for (int i = max(known, 1); i < count; ++i)
                chunk.decays[i] = __fadd_rn(chunk.decays[i - 1], chunk.decays[i]);
        read_state(chunk, state, known, count);
        score(chunk, known, count);
        __syncthreads();
        if (warp == 0) correct(chunk, known, count);
        __syncthreads();
        for (int i = known + warp; i < count; i += PARTS) {
            const float y = output_of(chunk, i);
            const long long row = token + i - known;
            if (has_column) {
                out[row * out_pitch + value] = y;
                if (end + i >= stop - net.ring_rows) deltas[(end + i) % net.ring_rows * values] = chunk.deltas[i][lane];
            }
            if (blockIdx.z == 0 && lane == 0) sums[row * net.value_heads + head] = chunk.decays[i];
        }
        // The last token that is no draft lies in this chunk: the state at its start is kept.
        if (own_stop > end && own_stop <= end + CHUNK && has_column && (end != loaded || start == 0)) {
            float* p = kept;
#pragma unroll
            for (int r = 0; r < ROWS; ++r, p += net.value_dim)
                if (r < rows) *p = state[r];
        }
        if (stop <= end + CHUNK) break;
        advance(chunk, state);
        position = max(position, end + CHUNK);
        __syncthreads();
    }
}

// out = fp16(norm(x) * silu(gate)) of each head, fp16 [T, out_pitch]; x: fp32 [T, x_pitch], the outputs of
// `delta_rule`; gate: fp16 [T, gate_pitch]; norm_weight: fp32 [value_dim]; zeros behind the last sequence. Keys, decays
// and the position of the state go to the slots. A block for each token.
__global__ void __launch_bounds__(THREADS) delta_output(
    const DeltaNet net, const float* x, long long x_pitch, const __half* gate, long long gate_pitch,
    const float* norm_weight, const float* sums, __half* out, long long out_pitch, float eps) {
    const Sequences step = net.sequences();
    launch_dependent_grids();
    wait_on_dependent_grids();
    const int token = blockIdx.x, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const bool is_padding = token >= step.cu_seqlens[step.count];
    for (int head = warp; head < net.value_heads; head += PARTS) {
        const long long column = head * net.value_dim;
        const float* row = x + token * x_pitch + column;
        float sum = 0;
        if (!is_padding)
            for (int d = lane; d < net.value_dim; d += WARP) sum = fmaf(row[d], row[d], sum);
        const float mean = __fdiv_rn(warp_sum(sum), static_cast<float>(net.value_dim));
        const float inverse = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps)));
        for (int d = lane; d < net.value_dim; d += WARP) {
            const float z = __half2float(gate[token * gate_pitch + column + d]);
            const float y = is_padding ? 0.0f : __fmul_rn(__fmul_rn(row[d], norm_weight[d]), inverse);
            out[token * out_pitch + column + d] =
                __float2half_rn(__fmul_rn(y, __fdiv_rn(z, __fadd_rn(1.0f, expf(-z)))));
        }
    }
    if (is_padding) return;
    const int sequence = step.of(token), position = step.position(sequence, token);
    const long long slot = step.slot(sequence);
    if (token == step.cu_seqlens[sequence + 1] - 1 && !step.is_draft(sequence, net.has_drafts) && threadIdx.x == 0)
        net.ends[slot * net.ends_pitch] = position / CHUNK * CHUNK;
    if (token < step.cu_seqlens[step.end_of_text(sequence, net.has_drafts)] - net.ring_rows) return;
    const int place = position % net.ring_rows;
    float* keys = net.keys + slot * net.keys_pitch + place * net.key_heads * net.key_dim;
    for (int head = warp; head < net.key_heads; head += PARTS) {
        const float* key = net.mixed + token * net.mixed_pitch + (net.key_heads + head) * net.key_dim;
        const float factor = inverse_length(key, net.key_dim);
        for (int d = lane; d < net.key_dim; d += WARP) keys[head * net.key_dim + d] = __fmul_rn(key[d], factor);
    }
    float* decays = net.decays + slot * net.decays_pitch + place * net.value_heads;
    for (int head = threadIdx.x; head < net.value_heads; head += THREADS)
        decays[head] = sums[token * net.value_heads + head];
}

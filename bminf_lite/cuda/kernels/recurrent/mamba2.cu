// The state space of Mamba 2 in chunks of CHUNK tokens at fixed positions: the formulas of backend/mamba2.py.
//
// A block of `state_space` computes a text of the step, its drafts included, in COLUMNS columns of a head, chunk by
// chunk. Thread (warp w, lane v) holds ROWS rows of column v of the state, from row w * ROWS on. A chunk begins with B
// and dt * x of its earlier tokens, which lie in the rings of the sequence's slot, and goes on with new tokens. One
// token and a whole chunk take the same way, so the bits of a token depend on its text alone: a product with the state
// is a sum by fma over the rows of each warp, and the warps are added from the first on; a product of C and B is that
// of 8 lanes, each of which has every eighth vector of four elements, added in a tree; sums over tokens go from the
// first to the last.
//
// `state_output` follows it: the gate and the norm of the outputs, and what other blocks of `state_space` read of the
// slot, which it therefore leaves alone: B, decays, and the position of the state.
#include "common/common.cuh"
#include "common/sequences.cuh"
#include "constants/mamba2.cuh"

using namespace bminf;

constexpr int COLUMNS = WARP;
constexpr int PARTS = THREADS / WARP;
constexpr int AT_ONCE = 8;       // tokens whose products with the state are added at once
constexpr int ROWS_AT_ONCE = 8;  // of a thread's rows of the state, which advance one batch after another
constexpr int DOT_LANES = 8;

// What the step reads of each token. mixed: fp32 [T, mixed_pitch] with x, B and C behind the convolution; steps: fp16
// [T, steps_pitch] with a step for each head, before its function; decay_rates, step_bias and skip: fp32 [heads]. Time
// steps are within min_step and max_step.
//
// What the sequences keep, in slots that are a pitch apart: states [heads, state_dim, head_dim], and rings of ring_rows
// tokens: keys [groups, state_dim], which are B, deltas [heads, head_dim], which are dt * x, decays [heads], fp32.
// ends: the position of the state. cu_seqlens to count: see Sequences.
struct StateSpace {
    const float* mixed;
    long long mixed_pitch;
    const __half* steps;
    long long steps_pitch;
    const float* decay_rates;
    const float* step_bias;
    const float* skip;
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
    int groups;
    int heads;
    int head_dim;
    int state_dim;
    float min_step;
    float max_step;

    __device__ __forceinline__ Sequences sequences() const {
        return {cu_seqlens, context_lens, slots, slots_pitch, count};
    }
};

// The chunk that a block computes, of states of up to N rows.
template <int N>
struct Chunk {
    __align__(16) float b[CHUNK][N + 4], c[CHUNK][N + 4];  // zeros behind state_dim
    float partial[PARTS][AT_ONCE][COLUMNS];
    float read[CHUNK][COLUMNS];    // C times the state
    float scores[CHUNK][CHUNK];    // C times B, with decay
    float deltas[CHUNK][COLUMNS];  // dt * x
    float decays[CHUNK], steps[CHUNK];
};

__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// Copies B of the chunk's tokens before `known` from the ring, and B and C of [known, count) from `mixed`, the first of
// which is `token`. Called by all threads.
template <int N>
__device__ __forceinline__ void load_vectors(
    Chunk<N>& chunk, const StateSpace& net, const float* ring, int group, int end, int known, int count, int token) {
    const int lane = threadIdx.x % WARP, dim = net.state_dim, values = net.heads * net.head_dim;
#pragma unroll 1
    for (int i = threadIdx.x / WARP; i < 2 * count; i += PARTS) {
        const int row = i / 2, is_c = i % 2;
        if (row < known && is_c) continue;
        float* to = is_c ? chunk.c[row] : chunk.b[row];
        const float* from = row < known ? ring + ((end + row) % net.ring_rows * net.groups + group) * dim
                                        : net.mixed + (token + row - known) * net.mixed_pitch + values +
                                              (is_c * net.groups + group) * dim;
        for (int d = lane; d < N; d += WARP) to[d] = d < dim ? from[d] : 0.0f;
    }
}

// Time steps and log-decays of the chunk's tokens. Called by all threads.
template <int N>
__device__ __forceinline__ void load_steps(
    Chunk<N>& chunk, const StateSpace& net, const float* ring, int head, int end, int known, int count, int token) {
    const int row = threadIdx.x;
    if (row >= count) return;
    if (row < known) {
        chunk.decays[row] = ring[(end + row) % net.ring_rows * net.heads + head];
        return;
    }
    const float given = __half2float(net.steps[(token + row - known) * net.steps_pitch + head]);
    const float step = softplus(__fadd_rn(given, net.step_bias[head]));
    chunk.steps[row] = step < net.min_step ? net.min_step : step > net.max_step ? net.max_step : step;
    chunk.decays[row] = __fmul_rn(net.decay_rates[head], chunk.steps[row]);
}

// Products of the new tokens' C with the state. Called by all threads.
template <int N>
__device__ __forceinline__ void read_state(Chunk<N>& chunk, const float (&state)[N / PARTS], int known, int count) {
    constexpr int ROWS = N / PARTS;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    for (int first = known; first < count; first += AT_ONCE) {
        const int tokens = min(AT_ONCE, count - first);
#pragma unroll 1
        for (int i = 0; i < tokens; ++i) {
            const float* x = chunk.c[first + i] + warp * ROWS;
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
        for (int i = warp; i < tokens; i += PARTS) {
            float sum = chunk.partial[0][i][lane];
#pragma unroll
            for (int part = 1; part < PARTS; ++part) sum = __fadd_rn(sum, chunk.partial[part][i][lane]);
            chunk.read[first + i][lane] = sum;
        }
        __syncthreads();
    }
}

// Products of the new tokens' C with B up to their own, with decay. Called by all threads.
template <int N>
__device__ __forceinline__ void score(Chunk<N>& chunk, int known, int count) {
    for (int i = threadIdx.x / DOT_LANES; i < CHUNK * (count - known); i += THREADS / DOT_LANES) {
        const int j = i % CHUNK, row = known + i / CHUNK;
        float sum = 0;
        if (j <= row) {
#pragma unroll 2
            for (int d = threadIdx.x % DOT_LANES * 4; d < N; d += DOT_LANES * 4) {
                const float4 a = *reinterpret_cast<const float4*>(chunk.c[row] + d);
                const float4 b = *reinterpret_cast<const float4*>(chunk.b[j] + d);
                sum = fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
            }
        }
#pragma unroll
        for (int d = DOT_LANES / 2; d; d /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(FULL, sum, d));
        if (j <= row && threadIdx.x % DOT_LANES == 0) {
            const float since = __fsub_rn(chunk.decays[row], chunk.decays[j]);
            chunk.scores[row][j] = __fmul_rn(sum, expf(since > 0.0f ? 0.0f : since));  // a NaN stays
        }
    }
}

// The output of a token in a column, without what skips the state.
template <int N>
__device__ __forceinline__ float output_of(const Chunk<N>& chunk, int i) {
    const int lane = threadIdx.x % WARP;
    float sum = 0;
#pragma unroll 4
    for (int j = 0; j <= i; ++j) sum = fmaf(chunk.scores[i][j], chunk.deltas[j][lane], sum);
    return fmaf(expf(chunk.decays[i]), chunk.read[i][lane], sum);
}

// The state behind a whole chunk, whose deltas get the decay until its end. Called by all threads.
template <int N>
__device__ __forceinline__ void advance(Chunk<N>& chunk, float (&state)[N / PARTS]) {
    constexpr int ROWS = N / PARTS;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const float last = chunk.decays[CHUNK - 1], decay = expf(last);
    __syncthreads();
    for (int j = warp; j < CHUNK; j += PARTS)
        chunk.deltas[j][lane] = __fmul_rn(expf(__fsub_rn(last, chunk.decays[j])), chunk.deltas[j][lane]);
    __syncthreads();
#pragma unroll
    for (int first = 0; first < ROWS; first += ROWS_AT_ONCE) {
        float added[ROWS_AT_ONCE] = {};
#pragma unroll 1
        for (int j = 0; j < CHUNK; ++j) {
            const float delta = chunk.deltas[j][lane];
            const float* row = chunk.b[j] + warp * ROWS + first;
#pragma unroll
            for (int r = 0; r < ROWS_AT_ONCE; r += 4) {
                const float4 b = *reinterpret_cast<const float4*>(row + r);
                added[r] = fmaf(b.x, delta, added[r]);
                added[r + 1] = fmaf(b.y, delta, added[r + 1]);
                added[r + 2] = fmaf(b.z, delta, added[r + 2]);
                added[r + 3] = fmaf(b.w, delta, added[r + 3]);
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS_AT_ONCE; ++r) state[first + r] = fmaf(decay, state[first + r], added[r]);
    }
}

// The outputs of all tokens, fp32 [T, out_pitch], and the sums of log-decays since their chunks' starts, `sums` fp32
// [T, heads]. States and dt * x go to the slots. States have up to N rows. The grid is (sequences, heads, head_dim /
// COLUMNS).
template <int N>
__global__ void __launch_bounds__(THREADS, 2)
    state_space(const StateSpace net, float* sums, float* out, long long out_pitch) {
    constexpr int ROWS = N / PARTS;
    __shared__ Chunk<N> chunk;
    const Sequences step = net.sequences();
    launch_dependent_grids();
    wait_on_dependent_grids();
    const int sequence = blockIdx.x, head = blockIdx.y, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int first_token = step.cu_seqlens[sequence], own_tokens = step.cu_seqlens[sequence + 1] - first_token;
    if (own_tokens == 0 || step.is_draft(sequence, net.has_drafts)) return;
    const int group = head / (net.heads / net.groups), column = blockIdx.z * COLUMNS + lane;
    const bool has_column = column < net.head_dim;
    const int start = step.context_lens[sequence], own_stop = start + own_tokens;
    const int stop = start + step.cu_seqlens[step.end_of_text(sequence, net.has_drafts)] - first_token;
    const long long slot = step.slot(sequence);
    const int loaded = start ? net.ends[slot * net.ends_pitch] : 0;
    const int value = head * net.head_dim + column, values = net.heads * net.head_dim;
    const int rows = net.state_dim - warp * ROWS;  // of this thread, if below ROWS
    float* const kept = net.states + slot * net.states_pitch +
                        (static_cast<long long>(head) * net.state_dim + warp * ROWS) * net.head_dim + column;
    float* const deltas = net.deltas + slot * net.deltas_pitch + value;
    const float skip = net.skip[head];
    float state[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) state[r] = start && has_column && r < rows ? kept[r * net.head_dim] : 0.0f;
    int position = start;  // of the next new token
    for (int end = loaded;; end += CHUNK) {
        const int known = min(position - end, CHUNK), count = min(stop - end, CHUNK);
        const int token = first_token + position - start;
        load_vectors<N>(chunk, net, net.keys + slot * net.keys_pitch, group, end, known, count, token);
        load_steps<N>(chunk, net, net.decays + slot * net.decays_pitch, head, end, known, count, token);
        __syncthreads();
        for (int i = warp; i < count; i += PARTS) {
            float delta = 0;
            if (has_column)
                delta = i < known ? deltas[(end + i) % net.ring_rows * values]
                                  : __fmul_rn(chunk.steps[i], net.mixed[(token + i - known) * net.mixed_pitch + value]);
            chunk.deltas[i][lane] = delta;
        }
        if (threadIdx.x == 0)
            for (int i = max(known, 1); i < count; ++i)
                chunk.decays[i] = __fadd_rn(chunk.decays[i - 1], chunk.decays[i]);
        read_state<N>(chunk, state, known, count);
        __syncthreads();
        score<N>(chunk, known, count);
        __syncthreads();
        for (int i = known + warp; i < count; i += PARTS) {
            const float y = output_of<N>(chunk, i);
            const long long row = token + i - known;
            if (has_column) {
                out[row * out_pitch + value] = __fadd_rn(y, __fmul_rn(skip, net.mixed[row * net.mixed_pitch + value]));
                if (end + i >= stop - net.ring_rows) deltas[(end + i) % net.ring_rows * values] = chunk.deltas[i][lane];
            }
            if (blockIdx.z == 0 && lane == 0) sums[row * net.heads + head] = chunk.decays[i];
        }
        // The last token that is no draft lies in this chunk: the state at its start is kept.
        if (own_stop > end && own_stop <= end + CHUNK && has_column && (end != loaded || start == 0)) {
            float* p = kept;
#pragma unroll
            for (int r = 0; r < ROWS; ++r, p += net.head_dim)
                if (r < rows) *p = state[r];
        }
        if (stop <= end + CHUNK) break;
        advance<N>(chunk, state);
        position = max(position, end + CHUNK);
        __syncthreads();
    }
}

// The sum over a block, in all threads. Called by all of them.
__device__ __forceinline__ float block_sum(float x, float (&parts)[PARTS]) {
#pragma unroll
    for (int d = WARP / 2; d; d /= 2) x = __fadd_rn(x, __shfl_xor_sync(FULL, x, d));
    __syncthreads();
    if (threadIdx.x % WARP == 0) parts[threadIdx.x / WARP] = x;
    __syncthreads();
    float sum = parts[0];
#pragma unroll
    for (int part = 1; part < PARTS; ++part) sum = __fadd_rn(sum, parts[part]);
    return sum;
}

// out = fp16(norm(x * silu(gate))), or with norm_first fp16(norm(x) * silu(gate)), of norm_groups parts of each row,
// fp16 [T, out_pitch]; without a norm_weight, fp16(x * silu(gate)). x: fp32 [T, x_pitch], the outputs of `state_space`;
// gate: fp16 [T, gate_pitch]; norm_weight: fp32 [heads * head_dim] or null; zeros behind the last sequence. B, decays
// and the position of the state go to the slots. A block for each token.
__global__ void __launch_bounds__(THREADS) state_output(
    const StateSpace net, const float* x, long long x_pitch, const __half* gate, long long gate_pitch,
    const float* norm_weight, int norm_groups, int norm_first, const float* sums, __half* out, long long out_pitch,
    float eps) {
    __shared__ float parts[PARTS];
    const Sequences step = net.sequences();
    launch_dependent_grids();
    wait_on_dependent_grids();
    const int token = blockIdx.x, size = net.heads * net.head_dim / norm_groups;
    const bool is_padding = token >= step.cu_seqlens[step.count];
    const auto gated = [](float y, float z) { return __fmul_rn(y, __fdiv_rn(z, __fadd_rn(1.0f, expf(-z)))); };
    for (int part = 0; part < norm_groups; ++part) {
        const float* row = x + token * x_pitch + part * size;
        const __half* z = gate + token * gate_pitch + part * size;
        __half* to = out + token * out_pitch + part * size;
        float inverse = 1.0f;
        if (norm_weight && !is_padding) {
            float sum = 0;
            for (int d = threadIdx.x; d < size; d += THREADS) {
                const float y = norm_first ? row[d] : gated(row[d], __half2float(z[d]));
                sum = fmaf(y, y, sum);
            }
            const float mean = __fdiv_rn(block_sum(sum, parts), static_cast<float>(size));
            inverse = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps)));
        }
        for (int d = threadIdx.x; d < size; d += THREADS) {
            float y = 0;
            if (!is_padding) {
                y = norm_first ? row[d] : gated(row[d], __half2float(z[d]));
                if (norm_weight) y = __fmul_rn(__fmul_rn(y, norm_weight[part * size + d]), inverse);
                if (norm_first) y = gated(y, __half2float(z[d]));
            }
            to[d] = __float2half_rn(y);
        }
    }
    if (is_padding) return;
    const int sequence = step.of(token), position = step.position(sequence, token);
    const long long slot = step.slot(sequence);
    if (token == step.cu_seqlens[sequence + 1] - 1 && !step.is_draft(sequence, net.has_drafts) && threadIdx.x == 0)
        net.ends[slot * net.ends_pitch] = position / CHUNK * CHUNK;
    if (token < step.cu_seqlens[step.end_of_text(sequence, net.has_drafts)] - net.ring_rows) return;
    const int place = position % net.ring_rows, keys = net.groups * net.state_dim;
    const float* b = net.mixed + token * net.mixed_pitch + net.heads * net.head_dim;
    for (int d = threadIdx.x; d < keys; d += THREADS) net.keys[slot * net.keys_pitch + place * keys + d] = b[d];
    float* decays = net.decays + slot * net.decays_pitch + place * net.heads;
    for (int head = threadIdx.x; head < net.heads; head += THREADS) decays[head] = sums[token * net.heads + head];
}

// One token of each sequence: its convolution, its chunk and the norm of its outputs in one kernel. The sums are those
// of chunks.cuh, for the one new row of a chunk.
//
// A cluster has the value heads of a key head, and a block COLUMNS columns of one of them. What the slots keep is
// loaded before the kernel's predecessor has ended: the state, which becomes the left operand of products, the rows of
// the chunk's earlier tokens, and the convolution's inputs and taps. A chunk that has ended is added to the state then.
// Behind a barrier of the cluster, all of its blocks have read what a slot keeps of a key head, and the token's row and
// the position of the state are written.
#pragma once
#include "common/cluster.cuh"
#include "recurrent/chunks.cuh"

namespace bminf {

constexpr int TOKEN_COLUMNS = WARPS * WARP_COLUMNS;  // of a head in a block
constexpr int MAX_BLOCKS = 8;                        // of a key head's value heads
// Warps with work of their own: with the token's query, with its key, two with its values, with its gates, that which
// writes outputs, and that which solves. The first PRODUCT_WARPS multiply the new row with the chunk's keys before they
// read the state.
constexpr int QUERY_WARP = 0, KEY_WARP = 1, VALUE_WARP = 4, GATE_WARP = 3, OUTPUT_WARP = 2, SOLVING_WARP = WARPS - 1;
constexpr int PRODUCT_WARPS = 4;

// A causal convolution of the channels of rows fp16 [T, rows_pitch], activated by SiLU: see short_convolution.cu. taps:
// fp32 [num_taps, channels], bias: fp32 [channels] or null; inputs: fp16, slots of [input_rows, channels].
struct Convolution {
    const __half* rows;
    long long rows_pitch;
    const float* taps;
    const float* bias;
    __half* inputs;
    long long inputs_pitch;
    int num_taps;
    int input_rows;
    int channels;
    int unused;
};

template <int N>
struct TokenRoom {
    Rows<N, false> rows;
    Factors factors;
    WarpRoom room[WARPS];
    float vectors[2][N];  // the key and the query
    float values[TOKEN_COLUMNS];
    __align__(16) float outputs[MAX_BLOCKS * TOKEN_COLUMNS];
};

// A channel of a thread: what the convolution reads of earlier tokens, and its taps.
struct TokenChannel {
    int channel;  // or -1
    float earlier[TOKEN_TAPS - 1], taps[TOKEN_TAPS];

    // ring: the inputs of the sequence.
    __device__ __forceinline__ void load(const Convolution& convolution, const __half* ring, int position) {
        const long long channels = convolution.channels;
#pragma unroll
        for (int j = 0; j < TOKEN_TAPS; ++j) {
            const bool is_tap = channel >= 0 && j < convolution.num_taps;
            taps[j] = is_tap ? convolution.taps[j * channels + channel] : 0.0f;
            if (j == 0) continue;
            const __half* row = ring + (position - j) % convolution.input_rows * channels;
            earlier[j - 1] = is_tap && position >= j ? __half2float(row[channel]) : 0.0f;
        }
    }
    // The result of the token's own input; 0 where there is no channel.
    __device__ __forceinline__ float mix(float input, const Convolution& convolution) const {
        float sum = 0;
#pragma unroll
        for (int j = 0; j < TOKEN_TAPS; ++j)
            if (j < convolution.num_taps) sum = __fadd_rn(sum, __fmul_rn(taps[j], j ? earlier[j ? j - 1 : 0] : input));
        if (channel < 0) return 0;
        if (convolution.bias) sum = __fadd_rn(sum, convolution.bias[channel]);
        return __fdiv_rn(sum, __fadd_rn(1.0f, expf(-sum)));
    }
};

// A warp's columns of a state as the left operand of products: see State::read.
template <int N>
struct StateOperand {
    unsigned a[N / 16][4];
    float unit;

    __device__ __forceinline__ explicit StateOperand(const State<N>& state) {
        float largest = 0;
#pragma unroll
        for (int t = 0; t < N / 8; ++t) largest = fmaxf(largest, fmaxf(fabsf(state.x[t][0]), fabsf(state.x[t][1])));
        const Unit of_state(State<N>::largest_of_four(largest));
        unit = of_state.unit;
#pragma unroll
        for (int k = 0; k < N / 16; ++k)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float* pair = state.x[2 * k + i];
                split(
                    __fmul_rn(pair[0], of_state.inverse), __fmul_rn(pair[1], of_state.inverse), a[k][2 * i],
                    a[k][2 * i + 1]);
            }
    }

    // Key, if CORRECTS, and query of row `row` times the state, in the lanes for which lane % 4 is row % 8 / 2.
    template <bool CORRECTS>
    __device__ __forceinline__ void read(float (&found)[2], const Rows<N, false>& rows, int row) const {
        const int lane = threadIdx.x % WARP, first = row / 8 * 8;
        StackedProduct products[2] = {};
        unsigned at[2];
#pragma unroll
        for (int kind = 0; kind < 2; ++kind) {
            const Vectors<N>& vectors = rows.reading(kind);
            const auto& half = lane < 16 ? vectors.high : vectors.low;
            at[kind] = cast_smem_ptr_to_uint(&half[first + lane % 8][lane / 8 % 2 * 8]);
        }
#pragma unroll
        for (int k = 0; k < N / 16; ++k)
#pragma unroll
            for (int kind = !CORRECTS; kind < 2; ++kind) {
                unsigned b[4];
                ldmatrix_x4(b, at[kind] + k * 32);
                products[kind].add(a[k], b);
            }
#pragma unroll
        for (int kind = !CORRECTS; kind < 2; ++kind) {
            const float sum = row % 2 ? products[kind].sum(1) : products[kind].sum(0);
            found[kind] = __fmul_rn(__fmul_rn(sum, unit), rows.reading(kind).unit[row]);
        }
    }
};

// `solve` for the one new row of a chunk. Returns its solve of this lane's difference. Called by a warp.
__device__ __forceinline__ float solve_row(Factors& factors, int row) {
    const int own = threadIdx.x % CHUNK;
    float solves[CHUNK], products[CHUNK], reads[CHUNK], rate = factors.rates[row];
#pragma unroll
    for (int j = 0; j < CHUNK; j += 4) {
        Tokens::load_4(products + j, &factors.solves[row][j]);
        Tokens::load_4(reads + j, &factors.reads[row][j]);
    }
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) solves[j] = factors.solves[j][own];
    __syncwarp();
    float earlier = 0;
#pragma unroll
    for (int j = 0; j < CHUNK - 1; ++j)
        if (j < row) earlier = fmaf(products[j], solves[j], earlier);
    const float last = own <= row ? __fmul_rn(rate, __fsub_rn(own == row ? 1.0f : 0.0f, earlier)) : 0.0f;
    float read = 0;
#pragma unroll
    for (int j = 0; j < CHUNK; ++j)
        if (j <= row) read = fmaf(reads[j], j == row ? last : solves[j], read);
    if (threadIdx.x % WARP < CHUNK) factors.reads[row][own] = read;
    return last;
}

// Adds a chunk of known tokens to the state. Called by all threads.
template <int N, class Rule>
__device__ __forceinline__ void add_known_chunk(
    State<N>& state, TokenRoom<N>& shared, const Recurrence& net, const Rule& rule, const Text& text, const Part& part,
    int head, int key_head, int value) {
    Tokens own;
    own.load(net, rule, text, part, value);
    load_known_rows<N, THREADS>(shared.rows.keys, net, text, part, key_head);
    if (Rule::CORRECTS) load_known_solves(shared.factors, net, text, part, head);
    if (threadIdx.x / WARP == GATE_WARP) load_decays(shared.factors, net, rule, text, part, head);
    __syncthreads();
    if (Rule::CORRECTS) {
        float* const room = shared.room[threadIdx.x / WARP].differences[threadIdx.x % WARP / 4];
        float differences[CHUNK];
#pragma unroll
        for (int i = 0; i < 4; i += 2)
            *reinterpret_cast<float2*>(room + Tokens::row(i)) = make_float2(own.x[i], own.x[i + 1]);
        __syncwarp();
#pragma unroll
        for (int j = 0; j < CHUNK; j += 4) Tokens::load_4(differences + j, room + j);
        own.add(shared.factors.solves, differences);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = Tokens::row(i);
        own.x[i] = __fmul_rn(__fmul_rn(shared.factors.remaining[row], own.x[i]), shared.rows.keys.unit[row]);
    }
    state.template advance<false>(own.x, shared.rows, shared.factors.decays[CHUNK - 1]);
    __syncthreads();
}

// The token of a cluster: the grid is (blocks of a key head's value heads, key_heads, tokens), a cluster has those
// along x, and each head `parts` of them. Sequences have one token each; outputs of tokens behind the last one are
// zeros. Unless the kernel `waits`, the slots are read and states written before its predecessors have ended.
//
// All threads call `outputs`, with a `column` of a head or one behind its last: to load what does not depend on the
// step, and what does; for what becomes of the result of the column; and to write, given what became of results. Those
// are of a head, or if IS_OF_GROUP of all value heads of a key head. `clear` writes zeros.
template <int N, class Rule, class Outputs>
__device__ __forceinline__ void compute_token(
    const Recurrence& net, const Rule& rule, const Convolution& convolution, Outputs& outputs, int parts, int waits,
    TokenRoom<N>& shared) {
    static_assert(THREADS == 2 * N, "a thread has an element of the query or of the key");
    const int token = blockIdx.z, key_head = blockIdx.y, group = net.value_heads / net.key_heads;
    const int head = key_head * group + blockIdx.x / parts, part_of_head = blockIdx.x % parts;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (waits) wait_on_dependent_grids();
    const Sequences step = net.sequences();
    const int first_column = part_of_head * TOKEN_COLUMNS + warp * WARP_COLUMNS, column = first_column + lane / 4;
    outputs.place(net, token, head, column);
    if (token >= step.cu_seqlens[step.count]) {
        wait_on_dependent_grids();
        outputs.clear();
        return;
    }
    cluster_arrive_relaxed<2>();
    const Text text(net, step.of(token), key_head);
    const int position = text.start;
    float* const kept =
        net.states + text.slot * net.states_pitch + static_cast<long long>(head) * net.key_dim * net.value_dim;
    const int value = head * net.value_dim + min(column, net.value_dim - 1);
    const auto load = [&](float& x, const float* from, bool exists) {
        const float found = *from;
        x = exists ? found : 0.0f;
    };
    int chunk = 0;
    if (position == 0 || text.loaded + CHUNK <= position) {  // the state of another position is kept
        State<N> next = {};
        if (position) next.each(net, first_column, kept, load);
#pragma unroll 1
        for (; text.loaded + (chunk + 1) * CHUNK <= position; ++chunk)
            add_known_chunk<N>(next, shared, net, rule, text, Part(text, chunk), head, key_head, value);
        next.each(net, first_column, kept, [&](float x, float* to, bool exists) {
            if (exists) *to = x;
        });
    }
    State<N> state;
    state.each(net, first_column, kept, load);
    const Part part(text, chunk);
    const int row = part.known;
    float* const room = shared.room[warp].differences[lane / 4];
    {
        const float* ring = net.deltas + text.slot * net.deltas_pitch + value;
        float known[CHUNK / 4];
#pragma unroll
        for (int i = 0; i < CHUNK / 4; ++i) {
            const int at = i * 4 + lane % 4;
            known[i] = at < row ? ring[net.ring_row(part.end + at) * net.values()] : 0.0f;
        }
        load_known_rows<N, THREADS>(shared.rows.keys, net, text, part, key_head);
        if (Rule::CORRECTS) load_known_solves(shared.factors, net, text, part, head);
#pragma unroll
        for (int i = 0; i < CHUNK / 4; ++i) room[i * 4 + lane % 4] = known[i];
    }
    __half* const ring = convolution.inputs + text.slot * convolution.inputs_pitch;
    // Threads have an element of the query or of the key, and some a value behind it.
    TokenChannel of_vector, of_value;
    const int element = threadIdx.x % N;
    const bool is_query = threadIdx.x < N, has_value = threadIdx.x / WARP / 2 == VALUE_WARP / 2;
    const int own_value = part_of_head * TOKEN_COLUMNS + threadIdx.x % TOKEN_COLUMNS;
    of_vector.channel = element < net.key_dim ? rule.first_channel(net, is_query, key_head) + element : -1;
    of_value.channel =
        has_value && own_value < net.value_dim ? rule.first_value(net) + head * net.value_dim + own_value : -1;
    of_vector.load(convolution, ring, position);
    if (has_value) of_value.load(convolution, ring, position);
    float sum = 0;  // of log-decays; of an earlier token until the row is known
    if (warp == GATE_WARP && lane < row)
        sum = net.decays[text.slot * net.decays_pitch + net.ring_row(part.end + lane) * net.value_heads + head];
    const StateOperand<N> operand(state);
    const float of_head = rule.of_head(head);
    outputs.load_weights();
    wait_on_dependent_grids();
    {
        const __half* own = convolution.rows + token * convolution.rows_pitch;
        __half* const own_inputs =
            ring + position % convolution.input_rows * static_cast<long long>(convolution.channels);
        const bool exists = of_vector.channel >= 0, is_value = of_value.channel >= 0;
        const __half of_own = exists ? own[of_vector.channel] : __half();
        const __half value_of_own = is_value ? own[of_value.channel] : __half();
        if (exists && blockIdx.x == 0) own_inputs[of_vector.channel] = of_own;
        if (is_value) own_inputs[of_value.channel] = value_of_own;
        float2 gates;
        if (warp == GATE_WARP) gates = rule.rate_and_decay(net, token, head);
        outputs.load_gates();
        shared.vectors[is_query][element] = of_vector.mix(__half2float(of_own), convolution);
        if (has_value)
            shared.values[threadIdx.x % TOKEN_COLUMNS] = of_value.mix(__half2float(value_of_own), convolution);
        if (warp == GATE_WARP) {
            const float before = __shfl_sync(FULL, sum, max(row, 1) - 1);
            if (lane < row) shared.factors.sums[lane] = sum;
            sum = __fadd_rn(row ? before : 0.0f, gates.y);
            if (lane == 0) {
                shared.factors.sums[row] = sum;
                shared.factors.decays[row] = expf(sum);
                shared.factors.rates[row] = gates.x;
            }
        }
    }
    __syncthreads();
    float x[N / WARP];  // of a key, in its warp
    if (warp == QUERY_WARP || warp == KEY_WARP) {
        const bool is_query = warp == QUERY_WARP;
        load_row<N>(x, shared.vectors[is_query], N);
        rule.scale(net, is_query, x);
        split_row<N>(is_query ? shared.rows.queries : shared.rows.keys, row, x);
    }
    __syncthreads();
    float read[2];  // the key and the query times the state
    if (warp < PRODUCT_WARPS) {
        Products<Rule::CORRECTS> products;
        products.template compute<N>(shared.rows, part);
        products.template store<N>(shared.factors, shared.rows, part);
    } else {
        operand.template read<Rule::CORRECTS>(read, shared.rows, row);
    }
    __syncthreads();
    float solved = 0;
    if (warp < PRODUCT_WARPS)
        operand.template read<Rule::CORRECTS>(read, shared.rows, row);
    else if (Rule::CORRECTS && warp == SOLVING_WARP)
        solved = solve_row(shared.factors, row);
    __syncthreads();
    cluster_wait<2>();                                                        // all blocks have started
    const bool is_owner = lane % 4 == row % 8 / 2 && column < net.value_dim;  // of the column's result
    if (is_owner) {
        const float own = shared.values[warp * WARP_COLUMNS + lane / 4], decay = shared.factors.decays[row];
        const float difference =
            Rule::CORRECTS ? fmaf(-decay, read[0], own) : __fmul_rn(shared.factors.rates[row], own);
        float sum_of_chunk = 0;
#pragma unroll
        for (int j = 0; j < CHUNK; j += 4) {
            float differences[4], factors[4];
            Tokens::load_4(differences, room + j);
            Tokens::load_4(factors, &shared.factors.reads[row][j]);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (j + i <= row)
                    sum_of_chunk = fmaf(factors[i], j + i == row ? difference : differences[i], sum_of_chunk);
        }
        if (row % 8 != 7) sum_of_chunk = __fadd_rn(sum_of_chunk, 0.0f);  // as of later tokens, which are zeros
        net.deltas[text.slot * net.deltas_pitch + net.ring_row(position) * net.values() + value] = difference;
        const float y = outputs.finish(rule.output(fmaf(decay, read[1], sum_of_chunk), own, of_head));
        constexpr bool IS_OF_GROUP = Outputs::IS_OF_GROUP;
        const int first = IS_OF_GROUP ? 0 : blockIdx.x - part_of_head, blocks = IS_OF_GROUP ? gridDim.x : parts;
        const int place = IS_OF_GROUP ? blockIdx.x / parts * net.value_dim + column : column;
        const unsigned address = cast_smem_ptr_to_uint(&shared.outputs[place]);
        for (int i = 0; i < blocks; ++i) st_shared_cluster(map_shared_rank(address, first + i), __float_as_int(y));
    }
    __syncwarp();
    cluster_sync<2>();
    outputs.write(shared.outputs, is_owner);
    const int place = net.ring_row(position);
    if (warp == KEY_WARP && blockIdx.x == 0) {
        float* keys = net.keys + text.slot * net.keys_pitch +
                      (static_cast<long long>(place) * net.key_heads + key_head) * net.key_dim;
#pragma unroll
        for (int i = 0; i < N / WARP; ++i) {
            const int d = i / 2 * 64 + lane * 2 + i % 2;
            if (d < net.key_dim) keys[d] = x[i];
        }
        if (lane == 0) net.ends[text.slot * net.ends_pitch + key_head] = part.end;
    }
    if (part_of_head) return;
    if (warp == GATE_WARP && lane == 0) net.decays[text.slot * net.decays_pitch + place * net.value_heads + head] = sum;
    if (Rule::CORRECTS && warp == SOLVING_WARP && lane < CHUNK)
        net.solves[text.slot * net.solves_pitch + (place * net.value_heads + head) * CHUNK + lane] = solved;
}

}  // namespace bminf

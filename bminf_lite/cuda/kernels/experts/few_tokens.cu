// The experts of a few tokens, bound by reading the weights of the chosen experts: w8a8, from the router's logits to
// the result in two kernels. Each block chooses the experts itself, which takes less time than a launch.
//
//     hidden[p] = fp16(f(gate) * up) of pair p, with [gate, up] = scaled(codes[token] @ weight[expert].T) + bias
//     out[t]  (+)= sum over j of weights[t, j] * fp16(scaled(quantize(rotate(hidden[t, j])) @ weight[expert].T) + bias)
//                 + gate[t] * addend[t]
//
// All tokens may share an expert: then each token has more pairs, its last ones, and their result in fp32 is the
// addend. They are parts of the shared expert, each with as many hidden values as another expert: one scale quantizes
// them, and their sums are added before they are scaled. Experts have no biases then.
//
// The codes of the tokens are those of rotated tokens where the first matrices rotate their input. The rotation of the
// hidden values may be left out.
//
// codes: int8 [tokens, pitch]; x_scale: fp32 [tokens]; weight: int8 [experts, n, pitch], or in slots; w_scale, bias:
// fp32 [experts, n]; hidden: fp16 [pairs, hidden_pitch]; out: fp32 [tokens, out_pitch]. The rows of gate and up
// alternate in groups of eight. The sums are exact, so the work divides among blocks and warps as in gemv.cu.
//
// The first kernel lets the second one start when it has waited for the logits. So the second one chooses and loads its
// first weights while the first one computes. The weights of the chosen experts' results have no part in the choice:
// the second kernel finds them too, while it would wait.
#include "common/common.cuh"
#include "common/rotation.cuh"
#include "experts/activation.cuh"
#include "experts/pair_side.cuh"
#include "experts/routing.cuh"
#include "experts/row_stream.cuh"

using namespace bminf;

// Blocks on an SM: one of this kernel and one of the next.
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
constexpr int BLOCKS_PER_SM = 2;
#else
constexpr int BLOCKS_PER_SM = 1;
#endif

// The experts of all pairs of the tokens, found by a warp for each token. A token has `each` pairs: those of its
// experts by rank, and behind them those of the shared expert's parts if there is one.
template <int EACH>
struct Choice {
    const Router& router;
    const float* logits;
    int tokens, each;
    const ExpertMatrix& matrix;
    int* ids;             // shared memory
    const int8** starts;  // of the experts' rows, shared memory

    // scratch: shared memory, free for copies afterwards.
    __device__ __forceinline__ void choose(char* scratch) const {
        const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        if (warp < tokens) {
            const int id = chooser(warp, scratch).choose(logits + warp * router.num_experts);
            const int own = lane < router.top_k ? id : ExpertMatrix::SHARED - (lane - router.top_k);
            const int pair = warp * each + lane;
            if (lane < each) ids[pair] = own, starts[pair] = matrix.rows_of(own);
        }
        __syncthreads();
    }

    // Calls store(pair, weight) in one thread for every pair whose expert was chosen, not shared.
    template <class Store>
    __device__ __forceinline__ void find_weights(const Store& store) const {
        const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, pair = warp * each + lane;
        if (warp >= tokens) return;
        const bool is_chosen = lane < router.top_k;
        const float weight =
            chooser(warp, nullptr).weight(logits + warp * router.num_experts, is_chosen ? ids[pair] : 0);
        if (is_chosen) store(pair, weight);
    }

private:
    __device__ __forceinline__ WarpRouter<EACH> chooser(int token, char* scratch) const {
        return WarpRouter<EACH>(router, reinterpret_cast<RoutingScratch*>(scratch)[token]);
    }
};

// The block's share of `all` outputs, in whole groups of GROUP.
template <int GROUP>
struct Share {
    int first, count;

    __device__ __forceinline__ explicit Share(unsigned all) {  // `all` times the number of blocks is below 2^32
        first = all / GROUP * blockIdx.x / gridDim.x * GROUP;
        count = all / GROUP * (blockIdx.x + 1) / gridDim.x * GROUP - first;
    }
};

// A block reads its rows of gate and up in the order in which they lie in memory.
//
// EACH: experts of a lane, see WarpRouter. F: see expert_activation. UNIT: bytes of a unit. k: elements of a row of
// codes, a multiple of 16. With scales_input the weights of the experts multiply the scales of their input. Dynamic
// shared memory: from 9.0 on the pipelines, else RoutingScratch for each token; tokens * width bytes of codes, where
// `width` is the pitch rounded up to whole units; a sum for each row that the block has, and with a side product
// another. In the kernel `pairs` are those of one token, and `each` the rows of an expert.
//
// Side: PairSide, of pairs in their own order and of gated experts without a shared one, or NoSide.
template <int EACH, bool GATED, int F, int UNIT, class Side>
__device__ __forceinline__ void hidden_values(
    const Side& side, const Router router, const float* logits, const int8* codes, const float* x_scale,
    const int8* __restrict__ weight, const int* slots, const float* __restrict__ w_scale,
    const float* __restrict__ bias, const SharedExpert shared_expert, __half* hidden, long long hidden_pitch,
    int tokens, int features, int k, int pitch, bool scales_input, float limit, float alpha, int scratch_bytes) {
    extern __shared__ __align__(128) char shared[];
    __shared__ int ids[MAX_FEW_PAIRS];
    __shared__ const int8* starts[MAX_FEW_PAIRS];
    __shared__ float scales[MAX_FEW_PAIRS];  // of the pairs' inputs
    const int width = (pitch + UNIT - 1) / UNIT * UNIT, pairs = router.top_k + shared_expert.shared_parts;
    constexpr int MATRICES = 1 + GATED;
    const Share<GATED ? GATE_GROUP : 1> share(tokens * pairs * features);
    const int rows = MATRICES * share.count, each = MATRICES * features;
    const int first_pair = share.first / features, first_feature = share.first % features;
    int8* tokens_codes = reinterpret_cast<int8*>(shared + scratch_bytes);
    int* sums = reinterpret_cast<int*>(tokens_codes + tokens * width);
    float* const sides = reinterpret_cast<float*>(sums + rows);  // what adapters add
    const ExpertMatrix matrix = {weight, slots, w_scale, shared_expert, each, pitch, features, 0};
    const ExpertRows<GATED> of_block = {matrix, starts + first_pair, ids + first_pair, 0, each};
    const RowUnits units(rows, width / UNIT, each, MATRICES * first_feature);
    RowStream<UNIT, GATED> stream(of_block, units, shared);
    for (int i = threadIdx.x; i < rows; i += FEW_THREADS) sums[i] = 0;
    if constexpr (!Side::EXISTS) {
        wait_on_dependent_grids();
        launch_dependent_grids();
    }
    // The last warps copy the codes while the first ones choose.
    const int from_last = FEW_THREADS - 1 - threadIdx.x;
    if (from_last < tokens * pairs) scales[from_last] = __ldcg(x_scale + from_last / pairs);
#pragma unroll 1
    for (int i = from_last; i < tokens * width / 16; i += FEW_THREADS) {
        const int token = i / (width / 16), column = i % (width / 16) * 16;
        const int4 zeros = {};
        *reinterpret_cast<int4*>(tokens_codes + token * width + column) =
            column < k ? __ldcg(reinterpret_cast<const int4*>(codes + static_cast<size_t>(token) * pitch + column))
                       : zeros;
    }
    const Choice<EACH> choice = {router, logits, tokens, pairs, matrix, ids, starts};
    choice.choose(shared);
    stream.start();
    // The kernel that writes the inputs of a side product has started this one when all else was complete.
    if constexpr (Side::EXISTS) {
        wait_on_dependent_grids();
        launch_dependent_grids();
    }
    // Output i: its first row among those of the block, and its pair and feature.
    const auto row_of = [&](int i) { return GATED ? i / GATE_GROUP * 2 * GATE_GROUP + i % GATE_GROUP : i; };
    const auto output = [&](int i) {
        int2 at = {first_pair, first_feature + i};
        while (at.y >= features) at.y -= features, ++at.x;
        return at;
    };
    // What a thread's first output needs besides its sums.
    float w_scales[2] = {}, biases[2] = {};
    const auto load_operands = [&](const int2& at) {
#pragma unroll
        for (int m = 0; m < MATRICES; ++m) {
            const int id = ids[at.x], row = matrix.row_of<GATED>(id, row_of(at.y) + m * GATE_GROUP);
            w_scales[m] = ld_global(matrix.scales_of(id) + row);
            if (bias) biases[m] = ld_global(bias + id * each + row);
        }
    };
    int2 at = output(threadIdx.x < share.count ? threadIdx.x : 0);
    if (threadIdx.x < share.count) {
        if constexpr (Side::EXISTS)  // their registers are needed
            prefetch_l2(matrix.scales_of(ids[at.x]) + matrix.row_of<GATED>(ids[at.x], row_of(at.y)));
        else
            load_operands(at);
    }
    // Of a warp's groups of features the ranks are fetched before the products, and multiplied behind them.
    using Sums = SumsOf<Side, 1, 0, true>;
    const auto for_groups = [&](const auto& apply) {
        static_assert(GATED || !Side::EXISTS);
#pragma unroll 1
        for (int i = threadIdx.x / WARP * GATE_GROUP; i < share.count; i += ROW_WARPS * GATE_GROUP) {
            const int2 of_group = output(i);
            apply(i, of_group.x, 2 * of_group.y);
        }
    };
    if constexpr (Side::EXISTS)
        for_groups([&](int, int pair, int channel) { Sums(side).prefetch(side.slot(pair), ids[pair], channel); });
    if (scales_input)
        choice.find_weights([&](int pair, float weight) { scales[pair] = __fmul_rn(scales[pair], weight); });
    const unsigned inverse = (65535 + pairs) / pairs;  // pair / pairs == pair * inverse / 65536
    multiply_units<UNIT>(
        stream, units,
        [&](const RowUnits& unit) { return tokens_codes + ((first_pair + unit.expert) * inverse >> 16) * width; }, sums,
        [] {});
    if constexpr (Side::EXISTS)
        for_groups([&](int i, int pair, int channel) {
            float found[4];
            Sums(side).products_of(pair, ids[pair], channel, found);
            const int lane = threadIdx.x % WARP;
            if (lane % 4 == 0)
                sides[row_of(i) + lane / 4] = found[0], sides[row_of(i) + GATE_GROUP + lane / 4] = found[2];
        });
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < share.count; i += FEW_THREADS) {
        if (Side::EXISTS || i != threadIdx.x) at = output(i), load_operands(at);
        float y[2] = {};
#pragma unroll
        for (int m = 0; m < MATRICES; ++m) {
            y[m] = scaled(__int2float_rn(sums[row_of(i) + m * GATE_GROUP]), scales[at.x], w_scales[m]);
            if constexpr (Side::EXISTS) y[m] = add_side(y[m], sides[row_of(i) + m * GATE_GROUP]);
            if (bias) y[m] = __fadd_rn(y[m], biases[m]);
        }
        hidden[at.x * hidden_pitch + at.y] = __float2half_rn(expert_activation<GATED, F>(y[0], y[1], {limit, alpha}));
    }
}

template <int EACH, bool GATED, int F, int UNIT>
__global__ void __launch_bounds__(FEW_THREADS, BLOCKS_PER_SM) few_tokens_hidden(
    const Router router, const float* logits, const int8* codes, const float* x_scale, const int8* __restrict__ weight,
    const int* slots, const float* __restrict__ w_scale, const float* __restrict__ bias,
    const SharedExpert shared_expert, __half* hidden, long long hidden_pitch, int tokens, int features, int k,
    int pitch, bool scales_input, float limit, float alpha, int scratch_bytes) {
    hidden_values<EACH, GATED, F, UNIT>(
        NoSide(), router, logits, codes, x_scale, weight, slots, w_scale, bias, shared_expert, hidden, hidden_pitch,
        tokens, features, k, pitch, scales_input, limit, alpha, scratch_bytes);
}

// The same with what adapters add.
template <int EACH, bool GATED, int F, int UNIT>
__global__ void __launch_bounds__(FEW_THREADS, BLOCKS_PER_SM) few_tokens_hidden_adapted(
    const PairSide side, const Router router, const float* logits, const int8* codes, const float* x_scale,
    const int8* __restrict__ weight, const int* slots, const float* __restrict__ w_scale,
    const float* __restrict__ bias, const SharedExpert shared_expert, __half* hidden, long long hidden_pitch,
    int tokens, int features, int k, int pitch, bool scales_input, float limit, float alpha, int scratch_bytes) {
    hidden_values<EACH, GATED, F, UNIT>(
        side, router, logits, codes, x_scale, weight, slots, w_scale, bias, shared_expert, hidden, hidden_pitch, tokens,
        features, k, pitch, scales_input, limit, alpha, scratch_bytes);
}

// Eight elements of a row between the two passes of quantize_pairs over it: as they are in memory, or rotated.
template <bool ROTATED>
struct PairVector {
    using Top = unsigned;
    static constexpr int HELD = 4;  // vectors of a thread that stay in registers
    uint4 raw;

    __device__ __forceinline__ void rotate(int, float) {}
    __device__ __forceinline__ void add_to(Top& top) const { top = packed_max(top, raw); }
    __device__ __forceinline__ static float value(Top top) { return larger_of(top); }
    __device__ __forceinline__ void get(float (&x)[8]) const { load8(reinterpret_cast<const __half*>(&raw), x); }
};

template <>
struct PairVector<true> {
    using Top = float;
    static constexpr int HELD = 2;
    uint4 raw;
    float v[1][8];

    // Called by all lanes of a warp, which have neighbouring vectors.
    __device__ __forceinline__ void rotate(int rotation, float rotation_scale) {
        load8(reinterpret_cast<const __half*>(&raw), v[0]);
        rotate_row(v, rotation, rotation_scale);
    }
    __device__ __forceinline__ void add_to(Top& top) const {
#pragma unroll
        for (int j = 0; j < 8; ++j) top = absmax(top, v[0][j]);
    }
    __device__ __forceinline__ static float value(Top top) { return top; }
    __device__ __forceinline__ void get(float (&x)[8]) const {
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] = v[0][j];
    }
};

// Quantizes rows of fp16, ROTATED or not, into shared memory, with zeros up to `width`, and their scales:
// backend/quantization.py. All warps take part: those of a group have one row at a time. A token has `each` rows, of
// which the last `parts` have one scale. If these are several, there are at most ROW_WARPS rows.
template <bool ROTATED>
__device__ __forceinline__ void quantize_pairs(
    const __half* rows, long long rows_pitch, int pairs, int each, int parts, int k, int width, int rotation,
    float rotation_scale, int8* codes, float* scales) {
    using Vector = PairVector<ROTATED>;
    constexpr int HELD = Vector::HELD;
    __shared__ float tops[ROW_WARPS];
    int group = ROW_WARPS;  // warps of a row, a power of two
    while (group > 1 && group * pairs > ROW_WARPS) group /= 2;
    const int warp = threadIdx.x / WARP, at_once = ROW_WARPS / group, step = group * WARP * 8;
    const int thread = threadIdx.x % (group * WARP);
    for (int base = 0; base < pairs; base += at_once) {
        const int row = base + warp / group;
        const bool exists = row < pairs;
        const __half* x = rows + (exists ? row : 0) * rows_pitch;
        const auto load = [&](int column) {
            Vector vector;
            vector.raw = {};
            if (exists && column < k) vector.raw = ld_global_cg_v4(x + column), zero_tail(vector.raw, column, k);
            return vector;
        };
        Vector held[HELD] = {};
        typename Vector::Top top = 0;
#pragma unroll
        for (int i = 0; i < HELD; ++i)
            if (i * step < k) held[i] = load(i * step + thread * 8);
#pragma unroll
        for (int i = 0; i < HELD; ++i)
            if (i * step < k) held[i].rotate(rotation, rotation_scale), held[i].add_to(top);
#pragma unroll 1
        for (int first = HELD * step; first < k; first += step) {
            Vector vector = load(first + thread * 8);
            vector.rotate(rotation, rotation_scale);
            vector.add_to(top);
        }
        const float own = warp_absmax(Vector::value(top));
        if (base > 0) __syncthreads();  // the maxima of the rows before have been read
        if (threadIdx.x % WARP == 0) tops[warp] = own;
        __syncthreads();
        int first_warp = warp / group * group, last_warp = first_warp + group;
        if (parts > 1 && row % each >= each - parts) {
            first_warp = (row / each * each + each - parts) * group, last_warp = first_warp + parts * group;
        }
        float largest = 0;
#pragma unroll 1
        for (int w = first_warp; w < last_warp; ++w) largest = absmax(largest, tops[w]);
        const RowScale s = row_scale(largest);
        if (!exists) continue;
        if (thread == 0) scales[row] = s.scale;
        const auto store = [&](const Vector& vector, int column) {
            float v[8];
            vector.get(v);
            if (column < width) *reinterpret_cast<uint2*>(codes + row * width + column) = quantize8(v, s.ratio);
        };
#pragma unroll
        for (int i = 0; i < HELD; ++i)
            if (i * step < width) store(held[i], i * step + thread * 8);
#pragma unroll 1
        for (int first = HELD * step; first < width; first += step) {
            Vector vector = load(first + thread * 8);
            vector.rotate(rotation, rotation_scale);
            store(vector, first + thread * 8);
        }
    }
}

// k: elements of a row of `hidden`, whose pitch in the weight is `pitch`. ADD: to fp32 values in memory. ROTATED: the
// rows are rotated in blocks of `rotation` elements. addend: fp32 [tokens, addend_pitch], or null where an expert is
// shared or none is; gate: [tokens], or null for ones. With scales_input the results are added as they are.
// launches_early: the successor may start at once; else it starts when the warps have started their last loads, which
// its own would delay. The first block writes topk_ids and topk_weights, [tokens, top_k]. Dynamic shared memory as
// above, with pairs * width bytes of codes; then an fp32 scale and an fp32 bias for each row that the block has.
template <int EACH, bool ADD, int UNIT, bool ROTATED, class Side>
__device__ __forceinline__ void add_results(
    const Side& side, const Router router, const float* logits, int* topk_ids, float* topk_weights,
    const __half* hidden, long long hidden_pitch, const int8* __restrict__ weight, const int* slots,
    const float* __restrict__ w_scale, const float* __restrict__ bias, const SharedExpert shared_expert, float* out,
    long long out_pitch, int tokens, int columns, int k, int pitch, bool scales_input, int rotation,
    float rotation_scale, const float* addend, long long addend_pitch, const float* gate, int scratch_bytes,
    bool launches_early) {
    extern __shared__ __align__(128) char shared[];
    __shared__ int ids[MAX_FEW_PAIRS];
    __shared__ const int8* starts[MAX_FEW_PAIRS];
    __shared__ float weights[MAX_FEW_PAIRS], x_scales[MAX_FEW_PAIRS];
    const int width = (pitch + UNIT - 1) / UNIT * UNIT, top_k = router.top_k;
    const int each = top_k + shared_expert.shared_parts, pairs = tokens * each;
    const Share<1> share(columns);
    const int rows = pairs * share.count;
    int8* codes = reinterpret_cast<int8*>(shared + scratch_bytes);
    int* sums = reinterpret_cast<int*>(codes + pairs * width);
    float* w_scales = reinterpret_cast<float*>(sums + rows);
    float* biases = w_scales + rows;
    float* const sides = biases + rows;  // what adapters add
    if (launches_early) launch_dependent_grids();
    const ExpertMatrix matrix = {weight, slots, w_scale, shared_expert, columns, pitch, 0, k};
    const Choice<EACH> choice = {router, logits, tokens, each, matrix, ids, starts};
    choice.choose(shared);
    const ExpertRows<false> of_block = {matrix, starts, ids, share.first, share.count};
    const RowUnits units(rows, width / UNIT, share.count, 0);
    RowStream<UNIT, false> stream(of_block, units, shared);
    stream.start();
#pragma unroll 1
    for (int i = threadIdx.x; i < rows; i += FEW_THREADS) {
        const int pair = i / share.count, place = i - pair * share.count;
        sums[i] = 0, w_scales[i] = ld_global(matrix.scales_of(ids[pair]) + share.first + place);
        biases[i] = bias ? bias[ids[pair] * columns + share.first + place] : 0.0f;
    }
    choice.find_weights([&](int pair, float weight) { weights[pair] = weight; });
    // Of a warp's groups of 16 columns of a pair the ranks are fetched before the wait, and multiplied behind the
    // products.
    using Sums = SumsOf<Side, 1, 0, false>;
    const auto for_groups = [&](const auto& apply) {
        const int groups = (share.count + 15) / 16;
#pragma unroll 1
        for (int i = threadIdx.x / WARP; i < pairs * groups; i += ROW_WARPS) apply(i / groups, i % groups * 16);
    };
    if constexpr (Side::EXISTS)
        for_groups([&](int pair, int place) { Sums(side).prefetch(side.slot(pair), ids[pair], share.first + place); });
    // What is added to an output, and what it is added to, of a thread's first output.
    float other = 0, factor = 1, before = 0;
    const auto load_operands = [&](int token, int column) {
        if (addend) other = ld_global_cg(addend + token * addend_pitch + column);
        if (gate) factor = ld_global_cg(gate + token);
        if (ADD) before = ld_global_cg(out + token * out_pitch + column);
    };
    const int outputs = tokens * share.count, first = threadIdx.x;
    int token = first < outputs ? first / share.count : 0;
    wait_on_dependent_grids();
    if (stream.unit.remaining <= 0) launch_dependent_grids();
    if (first < outputs) load_operands(token, share.first + first - token * share.count);
    quantize_pairs<ROTATED>(
        hidden, hidden_pitch, pairs, each, each - top_k, k, width, rotation, rotation_scale, codes, x_scales);
    __syncthreads();
    multiply_units<UNIT>(
        stream, units, [&](const RowUnits& unit) { return codes + unit.expert * width; }, sums, launch_dependent_grids);
    if constexpr (Side::EXISTS)
        for_groups([&](int pair, int place) {
            float found[4];
            Sums(side).products_of(pair, ids[pair], share.first + place, found);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int own = place + threadIdx.x % WARP / 4 + 8 * h;
                if (threadIdx.x % 4 == 0 && own < share.count) sides[pair * share.count + own] = found[2 * h];
            }
        });
    __syncthreads();
    const auto result = [&](int pair, int column, int parts) {
        const int row = pair * share.count + column;
        int sum = sums[row];
#pragma unroll 1
        for (int part = 1; part < parts; ++part) sum += sums[row + part * share.count];
        float y = scaled(__int2float_rn(sum), x_scales[pair], w_scales[row]);
        if constexpr (Side::EXISTS) y = add_side(y, sides[row]);
        return bias ? __fadd_rn(y, biases[row]) : y;
    };
#pragma unroll 1
    for (int i = first; i < outputs; i += FEW_THREADS) {
        if (i != first) token = i / share.count, load_operands(token, share.first + i - token * share.count);
        const int column = i - token * share.count;
        float total = 0;
#pragma unroll 4
        for (int j = 0; j < top_k; ++j) {
            float y = result(token * each + j, column, 1);
            y = __fmul_rn(scales_input ? 1.0f : weights[token * each + j], rounded(y));
            total = j == 0 ? y : __fadd_rn(total, y);
        }
        if (each > top_k)
            total = __fadd_rn(total, __fmul_rn(factor, result(token * each + top_k, column, each - top_k)));
        if (addend) total = __fadd_rn(total, __fmul_rn(factor, other));
        out[token * out_pitch + share.first + column] = ADD ? __fadd_rn(before, total) : total;
    }
    if (blockIdx.x == 0 && threadIdx.x < tokens * top_k) {
        const int pair = threadIdx.x / top_k * each + threadIdx.x % top_k;
        topk_ids[threadIdx.x] = ids[pair], topk_weights[threadIdx.x] = weights[pair];
    }
}

template <int EACH, bool ADD, int UNIT, bool ROTATED>
__global__ void __launch_bounds__(FEW_THREADS, BLOCKS_PER_SM) few_tokens_down(
    const Router router, const float* logits, int* topk_ids, float* topk_weights, const __half* hidden,
    long long hidden_pitch, const int8* __restrict__ weight, const int* slots, const float* __restrict__ w_scale,
    const float* __restrict__ bias, const SharedExpert shared_expert, float* out, long long out_pitch, int tokens,
    int columns, int k, int pitch, bool scales_input, int rotation, float rotation_scale, const float* addend,
    long long addend_pitch, const float* gate, int scratch_bytes, bool launches_early) {
    add_results<EACH, ADD, UNIT, ROTATED>(
        NoSide(), router, logits, topk_ids, topk_weights, hidden, hidden_pitch, weight, slots, w_scale, bias,
        shared_expert, out, out_pitch, tokens, columns, k, pitch, scales_input, rotation, rotation_scale, addend,
        addend_pitch, gate, scratch_bytes, launches_early);
}

// The same with what adapters add.
template <int EACH, bool ADD, int UNIT, bool ROTATED>
__global__ void __launch_bounds__(FEW_THREADS, BLOCKS_PER_SM) few_tokens_down_adapted(
    const PairSide side, const Router router, const float* logits, int* topk_ids, float* topk_weights,
    const __half* hidden, long long hidden_pitch, const int8* __restrict__ weight, const int* slots,
    const float* __restrict__ w_scale, const float* __restrict__ bias, const SharedExpert shared_expert, float* out,
    long long out_pitch, int tokens, int columns, int k, int pitch, bool scales_input, int rotation,
    float rotation_scale, const float* addend, long long addend_pitch, const float* gate, int scratch_bytes,
    bool launches_early) {
    add_results<EACH, ADD, UNIT, ROTATED>(
        side, router, logits, topk_ids, topk_weights, hidden, hidden_pitch, weight, slots, w_scale, bias, shared_expert,
        out, out_pitch, tokens, columns, k, pitch, scales_input, rotation, rotation_scale, addend, addend_pitch, gate,
        scratch_bytes, launches_early);
}
